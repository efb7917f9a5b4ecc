"""Which running rollouts are no longer needed."""

from collections.abc import Set

from rollout_client.contract.rollouts import Keep
from service.rollouts.group_selection import EarlyStopping

GROUPS = {"a1": 0, "a2": 0, "a3": 0, "b1": 1, "b2": 1, "b3": 1, "c1": 2, "c2": 2, "c3": 2}


def unneeded(keep: Keep, *ended: str) -> list[Set[str]]:
    """What each rollout's end makes unneeded. One whose name begins with `!` has failed."""
    early_stopping = EarlyStopping(keep, GROUPS)
    return [early_stopping.unneeded_after(name.removeprefix("!"), not name.startswith("!")) for name in ended]


NOBODY: Set[str] = frozenset()


def test_by_default_every_rollout_is_needed() -> None:
    assert unneeded(Keep(), *GROUPS) == [NOBODY] * 9


def test_a_group_with_enough_successes_cancels_its_own_others() -> None:
    assert unneeded(Keep(per_group=2), "a1", "b1", "a3") == [NOBODY, NOBODY, {"a2"}]
    assert unneeded(Keep(per_group=1), "b2") == [{"b1", "b3"}]


def test_a_failed_rollout_does_not_count() -> None:
    assert unneeded(Keep(per_group=1), "!a1", "a2") == [NOBODY, {"a3"}]


def test_a_rollout_that_ends_although_its_group_is_full_changes_nothing() -> None:
    assert unneeded(Keep(per_group=1), "a1", "a2", "!a3", "b1") == [{"a2", "a3"}, NOBODY, NOBODY, {"b2", "b3"}]
