"""How many generations one ingress may have on a replica, and the turns of policies beyond its adapters."""

import math
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.simulation.timing import Timing
from deployments.protocols.replicas import GeneratorDescription, ReplicaLoad
from service.scheduling.window import SUSPECT_AFTER, EngineCapacity, ReplicaWindow
from tests.service.scheduling.simulated_fleet import Batch, Fleet

CAPACITY = EngineCapacity(sequences=10, kv_tokens=1000)


def room_of(window: ReplicaWindow, tokens: float = 1.0) -> int:
    """Fills the window and empties it again; returns how many generations fitted in beside those that are there."""
    count = 0
    while window.has_room(tokens) and count < 100:
        window.add(tokens)
        count += 1
    for _ in range(count):
        window.remove(tokens)
    return count


@pytest.mark.parametrize(
    ("capacity", "factor", "tokens", "room"),
    [
        (CAPACITY, 1.0, 1.0, 10),
        (CAPACITY, 2.0, 1.0, 20),
        (CAPACITY, None, 1.0, 100),
        (CAPACITY, 2.0, 250.0, 4),
        (CAPACITY, 2.0, 5000.0, 1),
        (EngineCapacity.of(GeneratorDescription("m", 10, 10)), 2.0, 1.0, 100),
    ],
)
def test_a_window_has_room_for_a_multiple_of_the_batch_within_the_cache(
    capacity: EngineCapacity, factor: float | None, tokens: float, room: int
) -> None:
    assert room_of(ReplicaWindow(capacity, factor), tokens) == room


@pytest.mark.parametrize(("running", "has_room"), [(0, True), (1, True), (10, True), (11, False), (20, False)])
@pytest.mark.parametrize("choices", [10, 20, 128])
def test_a_call_of_many_choices_starts_in_a_half_empty_window(choices: int, running: int, has_room: bool) -> None:
    window = ReplicaWindow(CAPACITY, 2.0)
    for _ in range(running):
        window.add(1.0)
    assert window.has_room(1.0, choices) is has_room


def test_a_call_of_many_tokens_starts_when_half_of_the_cache_is_free() -> None:
    window = ReplicaWindow(CAPACITY, 2.0)
    window.add(500.0)
    assert window.has_room(5000.0, sequences=4)
    assert not window.has_room(5000.0)
    window.add(1.0)
    assert not window.has_room(5000.0, sequences=4)


def test_the_capacity_is_that_of_the_description() -> None:
    described = GeneratorDescription("m", 10, 10, max_num_seqs=3, kv_cache_size_tokens=70, max_loras=2)
    assert EngineCapacity.of(described) == EngineCapacity(sequences=3, kv_tokens=70, adapters=2)
    assert EngineCapacity.of(GeneratorDescription("m", 10, 10)).adapters == math.inf


@pytest.mark.parametrize(
    ("ongoing", "ingresses", "of_others", "rooms"),
    [
        (6, 2, 6, (14, 7)),
        # At least the same part as each of the others.
        (20, 2, 20, (10, 5)),
        # What is sent and what has ended cross each other on the way: the count is not exact.
        (9, 1, 0, (20, 10)),
    ],
)
def test_an_ingress_gets_what_is_left(ongoing: int, ingresses: int, of_others: int, rooms: tuple[int, int]) -> None:
    window = ReplicaWindow(CAPACITY, 2.0)
    window.observe(ReplicaLoad(ongoing, ingresses=ingresses), ended=0)
    assert (window.of_others, (room_of(window), room_of(window, tokens=100.0))) == (of_others, rooms)


def test_generations_of_this_ingress_are_none_of_others() -> None:
    window = ReplicaWindow(CAPACITY, 2.0)
    window.add(5.0, sequences=5)
    assert window.observe(ReplicaLoad(ongoing_generations=7, ingresses=2), ended=2)
    assert window.of_others == 4
    assert not window.observe(ReplicaLoad(ongoing_generations=7, ingresses=2), ended=2)


def test_after_failures_one_generation_at_a_time_tries_the_replica() -> None:
    window = ReplicaWindow(CAPACITY, 2.0)
    for _ in range(SUSPECT_AFTER - 1):
        window.note_failure()
    window.note_success()
    for _ in range(SUSPECT_AFTER - 1):
        window.note_failure()
    assert (window.is_suspect, room_of(window), window.has_free_sequence) == (False, 20, True)
    window.note_failure()
    assert (window.is_suspect, room_of(window), window.has_free_sequence) == (True, 1, False)
    window.note_success()
    assert (window.is_suspect, room_of(window), window.has_free_sequence) == (False, 20, True)


def test_a_sequence_is_free_while_generations_are_fewer_than_the_batch() -> None:
    window = ReplicaWindow(CAPACITY, 2.0)
    window.observe(ReplicaLoad(ongoing_generations=8, ingresses=2), ended=0)
    window.add(1.0)
    assert (window.ongoing, window.has_free_sequence) == (9, True)
    window.add(1.0)
    assert (window.ongoing, window.has_free_sequence) == (10, False)


TIMING = Timing(time_per_token_s=0.01, max_num_seqs=16)


def test_a_policy_that_has_its_adapter_in_the_batch_may_go_on() -> None:
    window = ReplicaWindow(EngineCapacity(adapters=1), 2.0)
    window.add(1.0, "a")
    assert [window.may_start(policy) for policy in ("a", "b", None)] == [True, False, True]


def fleet_of(names: str, max_loras: float, replicas: int = 1, rollouts: int = 1000) -> Fleet:
    """Each policy has one request, which generates all the time."""
    fleet = Fleet(replicas, TIMING, max_loras=max_loras)
    for name in names:
        fleet.post(Batch(name, rollouts=rollouts, turns=4, policy=name))
    return fleet


@pytest.mark.parametrize("max_loras", [1, 2])
def test_three_policies_take_turns_and_each_gets_its_share(max_loras: int) -> None:
    fleet = fleet_of("abc", max_loras)
    fleet.run(lambda: fleet.now > 200.0)
    shares = [fleet.turns_ended[name] / fleet.turns_ended.total() for name in "abc"]
    assert shares == pytest.approx([1 / 3] * 3, rel=0.2)
    assert fleet.replicas["r0"].most_policies == max_loras


def test_two_policies_share_by_the_weights_of_their_requests() -> None:
    fleet = fleet_of("", max_loras=1)
    for name, weight in (("a", 3.0), ("b", 1.0)):
        fleet.post(Batch(name, rollouts=1000, turns=4, policy=name, weight=weight))
    fleet.run(lambda: fleet.now > 300.0)
    assert fleet.turns_ended["a"] / fleet.turns_ended["b"] == pytest.approx(3.0, rel=0.25)


def test_policies_spread_over_replicas_in_place_of_waiting_for_turns() -> None:
    alone, shared = fleet_of("a", 1, rollouts=60), fleet_of("ab", 1, replicas=2, rollouts=60)
    alone.run()
    shared.run()
    # The first one has begun on both replicas.
    assert max(map(shared.seconds, "ab")) <= 1.4 * alone.seconds("a")


def test_generations_that_name_no_policy_wait_for_no_turn() -> None:
    fleet = fleet_of("ab", 1)
    for number in range(10):
        fleet.at(10.0 + number, partial(fleet.post, Batch(f"{number}", rollouts=1, turns=1)))
    fleet.run(lambda: len(fleet.ended) == 10)
    assert max(fleet.seconds(f"{number}") for number in range(10)) <= 2.5


batches = st.lists(
    st.tuples(st.sampled_from([None, "a", "b", "c", "d"]), st.integers(1, 30), st.integers(1, 3), st.floats(0, 4)),
    min_size=1,
    max_size=8,
)


@given(batches, st.integers(1, 3), st.integers(1, 3))
def test_no_replica_has_more_policies_than_its_engine_holds(
    given_batches: list[tuple[str | None, int, int, float]], replicas: int, max_loras: int
) -> None:
    fleet = Fleet(replicas, Timing(time_per_token_s=0.01, max_num_seqs=4), max_loras=max_loras)
    for number, (policy, rollouts, turns, at) in enumerate(given_batches):
        batch = Batch(f"{number}", rollouts=rollouts, turns=turns, policy=policy)
        fleet.at(at, partial(fleet.post, batch))
    fleet.run()
    assert len(fleet.ended) == len(given_batches)
    assert max(replica.most_policies for replica in fleet.replicas.values()) <= max_loras
