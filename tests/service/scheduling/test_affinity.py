"""Which replica each turn of a rollout goes to."""

import random
from collections import Counter
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from service.scheduling.affinity import GROUP_SLACK, ReplicaAffinity

REPLICAS = ("a", "b", "c")


def new_affinity() -> ReplicaAffinity:
    return ReplicaAffinity(random.Random(0))


def replica_of(affinity: ReplicaAffinity, rollout_id: str, group: str, replicas: Sequence[str]) -> str | None:
    return affinity.assignment_of(rollout_id, group, replicas).replica


def test_a_group_shares_a_replica_up_to_the_slack() -> None:
    affinity = new_affinity()
    replicas = [replica_of(affinity, f"{number}", "group", REPLICAS) for number in range(GROUP_SLACK + 2)]
    assert len(set(replicas[: GROUP_SLACK + 1])) == 1
    assert replicas[-1] != replicas[0]


def test_a_group_keeps_its_replica_while_any_of_its_rollouts_is_known() -> None:
    affinity = new_affinity()
    first, _ = (replica_of(affinity, name, "group", REPLICAS) for name in ("one", "two"))
    affinity.release("one")
    assert replica_of(affinity, "three", "group", REPLICAS) == first


def test_a_group_that_has_ended_is_forgotten() -> None:
    affinity = new_affinity()
    first = replica_of(affinity, "one", "group", REPLICAS)
    replica_of(affinity, "two", "group", REPLICAS)
    affinity.release("one")
    affinity.release("two")
    busy, idle = (replica for replica in REPLICAS if replica != first)
    replica_of(affinity, "other", "other", (str(first),))
    replica_of(affinity, "another", "another", (busy,))
    assert replica_of(affinity, "one", "group", REPLICAS) == idle


def test_a_failed_replica_is_used_again_if_there_is_no_other() -> None:
    affinity = new_affinity()
    replica_of(affinity, "one", "g", ("a",))
    affinity.mark_failed("one")
    assert replica_of(affinity, "one", "g", ("a",)) == "a"


def test_rollouts_that_moved_count_at_their_new_replica_alone() -> None:
    affinity = new_affinity()
    for name in ("one", "two"):
        replica_of(affinity, name, name, ("a",))
        assert replica_of(affinity, name, name, ("b",)) == "b"
        affinity.release(name)
    replica_of(affinity, "three", "three", ("b",))
    assert replica_of(affinity, "four", "four", ("a", "b")) == "a"


def test_without_replicas_a_rollout_has_none_until_there_are_some() -> None:
    affinity = new_affinity()
    assert replica_of(affinity, "one", "g", ()) is None
    assert replica_of(affinity, "one", "g", ("a",)) == "a"


Moves = st.lists(st.tuples(st.sampled_from(["turn", "fail", "release"]), st.integers(0, 12)), max_size=60)


@given(moves=Moves, groups=st.integers(1, 12), replicas=st.integers(1, 5))
def test_a_new_rollout_goes_where_the_fewest_are(moves: list[tuple[str, int]], groups: int, replicas: int) -> None:
    affinity, names = new_affinity(), [f"{number}" for number in range(replicas)]
    assigned: dict[str, str | None] = {}
    for move, rollout in moves:
        name = f"{rollout}"
        if move == "turn":
            assigned[name] = replica_of(affinity, name, f"{rollout % groups}", names)
        elif move == "fail":
            affinity.mark_failed(name)
            assigned.pop(name, None)
        else:
            affinity.release(name)
            assigned.pop(name, None)
        load = Counter(assigned.values())
        assert load[replica_of(affinity, "probe", "probe", names)] == min(load[replica] for replica in names)
        affinity.release("probe")
