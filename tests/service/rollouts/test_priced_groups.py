"""How many rollouts of a group are started, given those that have ended."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_client.contract.group_conditions import GenerationRange
from rollout_client.contract.rollouts import SampleResult
from service.rollouts.priced_groups import next_wave
from tests.clients.scripted_service import result

PLAYED = ("completed", "truncated", "max_turns")
CUT = ("error", "deadline", "stale", "cancelled")
Rollout = tuple[str, float]
"""Its status and its reward."""
rollouts = st.tuples(st.sampled_from(PLAYED) | st.sampled_from(CUT), st.sampled_from([0.0, 0.5, 1.0]))
PRICED = GenerationRange(min=4, max=32)
AT_ONCE = GenerationRange(min=4, max=32, width=1)


@st.composite
def ranges(draw: st.DrawFn) -> GenerationRange:
    least = draw(st.integers(1, 8))
    return GenerationRange(
        min=least,
        max=draw(st.integers(least, 40)),
        passes_at=draw(st.sampled_from([0.5, 1.0])),
        confidence=draw(st.floats(0.5, 0.99)),
        teaches=sorted(draw(st.tuples(st.floats(0, 1), st.floats(0, 1)))),
        width=draw(st.floats(0.05, 1)),
    )


def results_of(played: Sequence[Rollout]) -> list[SampleResult]:
    return [SampleResult.model_validate(result(status=status, total_reward=reward)) for status, reward in played]


def passing(count: int, of: int) -> list[Rollout]:
    return [("completed", 1.0)] * count + [("completed", 0.0)] * (of - count)


def sizes_of(generations: GenerationRange, story: Sequence[Rollout]) -> list[int]:
    """The sizes of the group after each wave, with these rollouts in order of their indices."""
    sizes = [generations.min]
    while sizes[-1] <= generations.max and (count := next_wave(generations, results_of(story[: sizes[-1]]))):
        sizes.append(sizes[-1] + count)
    return sizes


@given(generations=ranges(), story=st.lists(rollouts, min_size=40, max_size=40), seed=st.integers(0, 9))
def test_a_group_has_min_to_max_rollouts_in_waves_whatever_they_bring_and_in_whatever_order_they_end(
    generations: GenerationRange, story: list[Rollout], seed: int
) -> None:
    sizes = sizes_of(generations, story)
    assert generations.min == sizes[0] <= sizes[-1] <= generations.max
    assert sizes == [min(generations.min * wave, generations.max) for wave in range(1, len(sizes) + 1)]
    for size in sizes:
        ended = results_of(story[:size])
        shuffled = random.Random(seed).sample(ended, size)
        assert next_wave(generations, shuffled) == next_wave(generations, ended)


@given(generations=ranges(), played=st.lists(st.tuples(st.sampled_from(PLAYED), st.just(0.5)), min_size=1, max_size=30))
def test_rollouts_that_failed_or_were_cut_off_are_no_evidence(
    generations: GenerationRange, played: list[Rollout]
) -> None:
    """They only count among `max`: with room for them a group goes on exactly if it would without them."""
    generations = generations.model_copy(update={"max": 64})
    cut = [(status, 1.0) for status in CUT]
    with_cut = next_wave(generations, results_of([*played, *cut]))
    assert (with_cut > 0) == (next_wave(generations, results_of(played)) > 0)


@pytest.mark.parametrize(
    ("passed", "of", "further"),
    [(0, 4, 4), (0, 12, 4), (0, 15, 4), (0, 16, 0), (16, 16, 0), (1, 4, 0), (2, 4, 0), (3, 4, 0), (1, 16, 0)],
)
def test_a_group_goes_on_until_some_have_passed_and_some_not_or_the_interval_lies_outside(
    passed: int, of: int, further: int
) -> None:
    """Of 16 that all fail, the interval at 0.95 ends at 0.194."""
    assert next_wave(AT_ONCE, results_of(passing(passed, of))) == further


@pytest.mark.parametrize(("passed", "of", "further"), [(2, 4, 4), (4, 8, 4), (6, 12, 0), (1, 8, 0), (0, 4, 4)])
def test_a_group_that_teaches_goes_on_until_its_interval_is_narrow(passed: int, of: int, further: int) -> None:
    """The intervals are 0.70, 0.57, 0.49, 0.45, 0.49 wide."""
    assert next_wave(PRICED, results_of(passing(passed, of))) == further


def test_the_last_wave_ends_at_max() -> None:
    assert next_wave(GenerationRange(min=4, max=6), results_of(passing(0, 4))) == 2
    assert next_wave(GenerationRange(min=4, max=6), results_of(passing(0, 6))) == 0


def test_a_group_of_which_no_rollout_was_played_to_its_end_is_complete() -> None:
    assert next_wave(PRICED, results_of([("error", 0.0)] * 4)) == 0
    assert next_wave(PRICED, results_of([("error", 0.0)] * 4 + passing(0, 1))) == 4


def test_a_rollout_passes_with_the_reward_that_was_named_or_a_higher_one() -> None:
    played = results_of([("completed", 0.5), ("completed", 0.4)])
    assert next_wave(AT_ONCE.model_copy(update={"passes_at": 0.5}), played) == 0
    assert next_wave(AT_ONCE, played) == 4
