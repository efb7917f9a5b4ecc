"""Which groups are kept, how many are drawn ahead, and why a group is dropped."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_client.contract.rollouts import SampleResult
from rollout_client.contract.selection import GroupConditions, GroupCounts
from service.rollouts.group_selection import GroupSelection, fault_of

Verdict = str | None
FAILS = "reward_std.gt"
verdicts_of_many = st.lists(st.sampled_from([None, None, FAILS, "not_full"]), min_size=1, max_size=60)


@dataclass
class Played:
    """What a selection did while its groups ended in some order."""

    decided: list[tuple[int, bool]] = field(default_factory=list)
    in_flight: list[int] = field(default_factory=list)
    """How many groups were, each time that one was about to end."""
    undrawn_needs: list[int] = field(default_factory=list)
    """How many more groups had to be in flight then, for enough to pass if all do."""
    unneeded: set[int] = field(default_factory=set)

    @property
    def kept(self) -> list[int]:
        return [place for place, is_kept in self.decided if is_kept]


def play(selection: GroupSelection, groups: int, verdicts: Sequence[Verdict], seed: int) -> Played:
    """Ends the groups that are in flight in an order drawn with `seed`."""
    draw, played = random.Random(seed), Played()
    in_flight: list[int] = []
    passed = begun = 0
    while True:
        places = selection.draw()
        begun = max(begun, places.stop)
        in_flight += places
        if selection.is_done:
            return played
        played.in_flight.append(len(in_flight))
        missing = groups - passed - len(in_flight)
        played.undrawn_needs.append(missing if begun < len(verdicts) else 0)
        place = in_flight.pop(draw.randrange(len(in_flight)))
        passed += verdicts[place] is None
        played.decided += selection.end(place, verdicts[place])
        played.unneeded |= set(selection.unneeded())
        in_flight = [other for other in in_flight if other not in played.unneeded]


@given(verdicts=verdicts_of_many, groups=st.integers(1, 12), seeds=st.tuples(st.integers(), st.integers()))
def test_the_first_groups_that_pass_are_kept_in_whatever_order_groups_end(
    verdicts: list[Verdict], groups: int, seeds: tuple[int, int]
) -> None:
    expected = [place for place, fault in enumerate(verdicts) if fault is None][:groups]
    counts = []
    for seed in seeds:
        selection = GroupSelection(groups, len(verdicts), 2 * groups)
        played = play(selection, groups, verdicts, seed)
        assert played.kept == expected
        assert [place for place, _ in played.decided] == list(range(len(played.decided)))
        assert played.unneeded.isdisjoint(place for place, _ in played.decided)
        counts.append(selection.counts.model_copy(update={"ahead": 0}))
    drawn = expected[-1] + 1 if len(expected) == groups else len(verdicts)
    dropped = Counter(fault for fault in verdicts[:drawn] if fault is not None)
    assert counts == [GroupCounts(drawn=drawn, kept=len(expected), dropped=dict(dropped), ahead=0)] * 2


@given(verdicts=verdicts_of_many, groups=st.integers(1, 12), most=st.integers(1, 3), seed=st.integers())
def test_engines_never_wait_for_a_verdict(verdicts: list[Verdict], groups: int, most: int, seed: int) -> None:
    played = play(GroupSelection(groups, len(verdicts), most * groups), groups, verdicts, seed)
    assert all(1 <= count <= most * groups for count in played.in_flight)
    assert max(played.undrawn_needs) <= 0


def test_more_groups_are_drawn_ahead_the_fewer_have_passed() -> None:
    selection = GroupSelection(16, 100, 32)
    assert selection.draw() == range(16)
    for place in range(4):
        selection.end(place, FAILS)
    # None of 4 has passed: with 4 that count as passed, half of them do, and 16 are needed.
    assert selection.draw() == range(16, 36)
    for place in range(4, 16):
        selection.end(place, None)
    # 12 of 16 have passed: 4 are needed, and 20 are in flight.
    assert selection.draw() == range(36, 36)


def test_a_group_that_has_passed_and_is_not_decided_is_not_drawn_for_again() -> None:
    selection = GroupSelection(2, 10, 4)
    selection.draw()
    assert selection.end(1, None) == []
    assert selection.draw() == range(2, 2)


def test_a_group_that_enough_groups_before_it_have_passed_is_not_needed() -> None:
    selection = GroupSelection(2, 10, 4)
    selection.draw()
    selection.end(1, FAILS)
    assert (selection.draw(), selection.unneeded()) == (range(2, 4), range(0))
    selection.draw(at_least=6)
    assert selection.end(2, None) == []
    assert selection.end(4, None) == []
    assert selection.unneeded() == range(5, 6)
    assert selection.end(0, None) == [(0, True), (1, False), (2, True)]
    assert (selection.is_done, selection.unneeded()) == (True, range(3, 6))
    assert selection.counts == GroupCounts(drawn=3, kept=2, dropped={FAILS: 1}, ahead=3)


def test_without_further_draws_it_ends_with_the_groups_that_were_begun() -> None:
    selection = GroupSelection(2, 10, 4)
    selection.draw()
    selection.stop_drawing()
    selection.end(0, None)
    assert not selection.is_done
    selection.end(1, FAILS)
    assert (selection.is_done, selection.draw()) == (True, range(2, 2))


def test_what_an_earlier_process_has_begun_begins_at_once() -> None:
    assert GroupSelection(2, 10, 4).draw(at_least=9) == range(9)
    assert GroupSelection(2, 10, 4).draw(at_least=12) == range(10)


def result(reward: float | None = 0.0, status: str = "completed", **named: float) -> SampleResult:
    fields: dict[str, Any] = {"total_reward": reward, "rewards": named, "status": status}
    return SampleResult.model_construct(**fields)


def fault(where: dict[str, Any], *results: SampleResult, full: int = 0) -> str | None:
    return fault_of(results, GroupConditions.model_validate(where), full)


VARIED, EQUAL = (result(0.0), result(1.0)), (result(0.1), result(0.1), result(0.1))


@pytest.mark.parametrize(
    ("where", "results", "expected"),
    [
        ({"reward_std": {"gt": 0}}, VARIED, None),
        # In floating point the mean of three times 0.1 is above 0.1, and so is their deviation above 0.
        ({"reward_std": {"gt": 0}}, EQUAL, "reward_std.gt"),
        ({"reward_std": {"gt": 0.5}}, VARIED, "reward_std.gt"),
        ({"reward_std": {"ge": 0.5}}, VARIED, None),
        ({"reward_mean": {"ge": 0.5, "le": 0.5}}, VARIED, None),
        ({"reward_mean": {"gt": 0.1}}, EQUAL, "reward_mean.gt"),
        ({"reward_mean": {"ge": 0.1, "lt": 0.1}}, EQUAL, "reward_mean.lt"),
        ({"reward_mean": {"le": 0.4}, "reward_std": {"gt": 1}}, VARIED, "reward_mean.le"),
    ],
)
def test_a_group_is_dropped_by_the_first_condition_that_it_fails(
    where: dict[str, Any], results: Sequence[SampleResult], expected: str | None
) -> None:
    assert fault(where, *results) == expected


def test_conditions_of_a_named_reward_are_over_the_rollouts_that_have_it() -> None:
    results = result(0.0, form=1.0), result(9.0, form=0.0), result(5.0)
    assert fault({"rewards": {"form": {"mean": {"ge": 0.5}, "std": {"ge": 0.5}}}}, *results) is None
    assert fault({"rewards": {"form": {"mean": {"gt": 0.5}}}}, *results) == "rewards.form.mean.gt"
    assert fault({"rewards": {"form": {"std": {"lt": 0.5}}}}, *results) == "rewards.form.std.lt"
    assert fault({"rewards": {"other": {"mean": {"gt": 0}}}}, *results) == "rewards.other.missing"


def test_a_group_of_which_too_few_were_played_to_their_ends_is_not_full() -> None:
    results = result(0.0), result(1.0), result(None, "error"), result(9.0, "cancelled"), result(9.0, "stale")
    assert fault({"reward_mean": {"le": 0.5}}, *results, full=3) == "not_full"
    assert fault({"reward_mean": {"le": 0.5}}, *results, full=2) is None
