"""Conversations and the replicas that they are at home on."""

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from service.remote.replica_affinity import GROUP_SLACK, ReplicaAffinity

REPLICAS = ("a", "b", "c")


def homes() -> ReplicaAffinity:
    return ReplicaAffinity(random.Random(0))


def test_a_conversation_stays_where_it_began() -> None:
    there = homes()
    first = there.home_of("one", "g", REPLICAS)
    for number in range(20):
        there.home_of(f"other {number}", f"group {number}", REPLICAS)
    assert there.home_of("one", "g", REPLICAS) == first


def test_new_conversations_are_spread_evenly() -> None:
    there = homes()
    given_out = Counter(there.home_of(f"{number}", f"{number}", REPLICAS) for number in range(31))
    assert sorted(given_out.values()) == [10, 10, 11]


def test_a_released_conversation_makes_room_for_another() -> None:
    there = homes()
    by_replica = {there.home_of(f"{number}", f"{number}", REPLICAS): f"{number}" for number in range(3)}
    there.release(by_replica["b"])
    assert there.home_of("new", "new", REPLICAS) == "b"


def test_a_group_shares_a_replica_until_that_one_carries_too_much_more() -> None:
    there = homes()
    settled = [there.home_of(f"{number}", "group", REPLICAS) for number in range(GROUP_SLACK + 2)]
    assert len(set(settled[: GROUP_SLACK + 1])) == 1
    assert settled[-1] != settled[0]


def test_a_conversation_whose_replica_is_gone_moves_and_then_stays() -> None:
    there = homes()
    first = there.home_of("one", "g", REPLICAS)
    left = tuple(replica for replica in REPLICAS if replica != first)
    second = there.home_of("one", "g", left)
    assert second in left
    assert there.home_of("one", "g", REPLICAS) == second


def test_a_conversation_that_lost_its_replica_goes_elsewhere_even_if_that_one_is_still_listed() -> None:
    there = homes()
    first = there.home_of("one", "g", REPLICAS)
    there.lost("one")
    assert there.home_of("one", "g", REPLICAS) != first


def test_where_there_is_only_one_replica_it_is_tried_again() -> None:
    there = homes()
    there.home_of("one", "g", ("a",))
    there.lost("one")
    assert there.home_of("one", "g", ("a",)) == "a"


def test_without_replicas_there_is_no_home_yet() -> None:
    there = homes()
    assert there.home_of("one", "g", ()) is None
    assert there.home_of("one", "g", ("a",)) == "a"


def test_what_is_not_known_can_be_lost_and_released() -> None:
    there = homes()
    there.lost("one")
    there.release("one")
    assert [there.load_of(replica) for replica in REPLICAS] == [0, 0, 0]


Moves = st.lists(st.tuples(st.sampled_from(["turn", "lost", "release"]), st.integers(0, 12)), max_size=60)


@given(moves=Moves, groups=st.integers(1, 12), replicas=st.integers(1, 5))
def test_what_is_loaded_is_what_was_given_out_and_not_released(
    moves: list[tuple[str, int]], groups: int, replicas: int
) -> None:
    there, at_home, names = homes(), {}, [f"{number}" for number in range(replicas)]
    for move, conversation in moves:
        name = f"{conversation}"
        if move == "turn":
            at_home[name] = there.home_of(name, f"{conversation % groups}", names)
        elif move == "lost":
            there.lost(name)
            at_home.pop(name, None)
        else:
            there.release(name)
            at_home.pop(name, None)
        assert {replica: there.load_of(replica) for replica in names} == {
            replica: list(at_home.values()).count(replica) for replica in names
        }


@given(conversations=st.integers(1, 60), replicas=st.integers(1, 7))
def test_without_groups_no_two_replicas_differ_by_more_than_one(conversations: int, replicas: int) -> None:
    there, names = homes(), [f"{number}" for number in range(replicas)]
    for number in range(conversations):
        there.home_of(f"{number}", f"{number}", names)
    loads = [there.load_of(name) for name in names]
    assert max(loads) - min(loads) <= 1
