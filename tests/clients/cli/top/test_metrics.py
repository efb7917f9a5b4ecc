"""Pages of metrics: what is read of them, and the rates between two readings, also when processes start anew."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_client.cli.top.metrics import FORGOTTEN_AFTER_S, Rates, Series, Values, values_of
from tests.clients.cli.top.recorded import FIRST, GENERATOR

WINDOW_S = 1e6
NAME = "rollout_turns_total"
counts = st.integers(0, 10**6)


def turns(replica: str = "a", task: str = "math") -> Series:
    return Series(NAME, (("replica", replica), ("task_name", task)))


def rates_of(*readings: tuple[float, Values], window_s: float = WINDOW_S) -> Rates:
    rates = Rates(window_s)
    for at_s, counters in readings:
        rates.take(at_s, counters)
    return rates


def test_before_the_second_reading_nothing_is_known() -> None:
    rates = rates_of((0, {turns(): 5}))
    assert (rates.span_s, rates.rate(NAME), rates.by_label("task_name", NAME)) == (None, None, {})


def test_a_rate_is_what_was_added_by_the_seconds_between() -> None:
    rates = rates_of((10, {turns("a"): 5, turns("b", "code"): 0}), (14, {turns("a"): 25, turns("b", "code"): 4}))
    assert (rates.span_s, rates.rate(NAME)) == (4, 6.0)
    assert rates.by_label("task_name", NAME) == {"math": 5.0, "code": 1.0}
    assert rates.rate(NAME, task_name="code") == 1.0
    assert (rates.rate(NAME, task_name="none"), rates.rate("other")) == (None, None)


def test_a_new_replica_counts_from_0() -> None:
    assert rates_of((0, {turns("a"): 5}), (1, {turns("a"): 6, turns("b"): 3})).rate(NAME) == 4.0


def test_a_replica_that_has_ended_adds_nothing_more() -> None:
    readings = [(0.0, {turns("a"): 5.0, turns("b"): 0.0}), (1.0, {turns("b"): 2.0})]
    assert rates_of(*readings).rate(NAME) == 2.0
    rates = rates_of(*readings, (FORGOTTEN_AFTER_S + 2, {turns("b"): 2.0}), window_s=1)
    assert rates.by_label("replica", NAME) == {"b": 0.0}


def test_old_readings_leave_the_window_but_the_last_that_is_as_old_as_the_window() -> None:
    readings = [(float(at_s), {turns(): float(at_s**2)}) for at_s in range(6)]
    rates = rates_of(*readings, window_s=2)
    assert (rates.span_s, rates.rate(NAME)) == (2, (25 - 9) / 2)


@given(st.lists(counts, min_size=2))
def test_a_counter_that_only_grows_has_the_rate_of_its_first_and_last_reading(additions: list[int]) -> None:
    values = [sum(additions[: place + 1]) for place in range(len(additions))]
    rates = rates_of(*((place, {turns(): float(value)}) for place, value in enumerate(values)))
    assert rates.rate(NAME) == pytest.approx((values[-1] - values[0]) / (len(values) - 1))


@given(st.lists(st.dictionaries(st.sampled_from("abc"), counts), min_size=2), st.floats(0.5, 10))
def test_no_rate_is_below_0_and_those_of_all_labels_add_up(readings: list[dict[str, int]], window_s: float) -> None:
    rates = Rates(window_s)
    for at_s, values in enumerate(readings):
        rates.take(at_s, {turns(replica): value for replica, value in values.items()})
        by_replica = rates.by_label("replica", NAME)
        assert all(rate >= 0 for rate in by_replica.values())
        assert (rates.rate(NAME) or 0.0) == pytest.approx(sum(by_replica.values()))


@given(st.lists(st.tuples(counts, st.booleans()), min_size=2))
def test_after_restarts_no_more_is_counted_than_was_added(steps: list[tuple[int, bool]]) -> None:
    """A step adds to the counter, of a process that first started anew or not. Nothing is missed of one that fell."""
    value, added, missed = 0, 0, 0
    readings = [(0.0, {turns(): 0.0})]
    for addition, starts_anew in steps:
        before, value = value, addition if starts_anew else value + addition
        added += addition
        missed += before if starts_anew and value >= before else 0
        readings.append((len(readings), {turns(): float(value)}))
    counted = (rates_of(*readings).rate(NAME) or 0.0) * (len(readings) - 1)
    assert counted == pytest.approx(added - missed)


@given(st.lists(counts, min_size=3, max_size=8), st.data())
def test_what_a_reading_misses_changes_nothing_in_the_end(additions: list[int], data: st.DataObject) -> None:
    values = [float(sum(additions[: place + 1])) for place in range(len(additions))]
    missed = data.draw(st.sets(st.integers(1, len(values) - 2)))
    whole = [(float(place), {turns(): value}) for place, value in enumerate(values)]
    holed = [(at_s, {} if at_s in missed else counters) for at_s, counters in whole]
    assert rates_of(*holed).rate(NAME) == pytest.approx(rates_of(*whole).rate(NAME))


@given(st.lists(st.floats(0.1, 30), min_size=1, max_size=40), st.floats(0.1, 60))
def test_the_window_is_never_shorter_than_asked_for_once_there_are_readings_for_it(
    pauses: list[float], window_s: float
) -> None:
    times = [sum(pauses[:place]) for place in range(len(pauses) + 1)]
    rates = rates_of(*((at_s, {turns(): 1.0}) for at_s in times), window_s=window_s)
    assert rates.span_s is not None
    if times[-1] - times[0] >= window_s:
        longest = max(later - earlier for earlier, later in pairwise(times))
        assert window_s - 1e-6 <= rates.span_s <= window_s + longest + 1e-6
    else:
        assert rates.span_s == times[-1]


def test_the_recorded_page_has_the_series_that_are_shown() -> None:
    values = values_of(FIRST)
    found = {series.name for series in values}
    assert found == {
        "rollout_in_flight",
        "rollout_policy_age_seconds",
        "rollout_policy_version",
        "rollout_reward_count",
        "rollout_reward_sums_total",
        "rollout_rollouts_total",
        "rollout_tokens_total",
        "rollout_turns_total",
        "rollout_waiting_generations",
        "serve_deployment_replica_healthy",
        "vllm_generation_tokens_total",
        "vllm_kv_cache_usage_perc",
        "vllm_num_requests_running",
        "vllm_num_requests_waiting",
        "vllm_prefix_cache_hits_total",
        "vllm_prefix_cache_queries_total",
    }
    [tokens] = [series for series in values if series.name == "vllm_generation_tokens_total"]
    assert (tokens.label("ReplicaId"), tokens.label("none"), values[tokens]) == (GENERATOR, "", 41181.0)


def test_what_is_not_shown_is_not_parsed() -> None:
    page = '# TYPE ray_other counter\nray_other{ no format\nother 1\n\nray_rollout_in_flight{replica="a\\"b"} 3\n'
    assert values_of(page) == {Series("rollout_in_flight", (("replica", 'a"b'),)): 3.0}


@pytest.mark.parametrize("page", ["", "<html>A portal</html>"])
def test_a_page_without_metrics_has_none(page: str) -> None:
    assert values_of(page) == {}


def test_a_line_that_is_cut_off_raises() -> None:
    with pytest.raises(ValueError, match="could not convert string to float"):
        values_of('ray_rollout_in_flight{replica="a"')
