"""How many generations one ingress may have on a replica."""

import pytest

from deployments.protocols.generation import GeneratorDescription, ReplicaLoad
from service.scheduling.replica_window import SUSPECT_AFTER, EngineCapacity, ReplicaWindow

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


@pytest.mark.parametrize(("factor", "room"), [(1.0, 10), (2.0, 20), (None, 100)])
def test_a_window_holds_a_multiple_of_the_engines_batch(factor: float | None, room: int) -> None:
    assert room_of(ReplicaWindow(CAPACITY, factor)) == room


def test_a_window_holds_no_more_tokens_than_the_kv_cache() -> None:
    assert room_of(ReplicaWindow(CAPACITY, 2.0), tokens=250.0) == 4


def test_generations_that_are_longer_than_expected_leave_less_room() -> None:
    window = ReplicaWindow(CAPACITY, 2.0)
    for _ in range(2):
        window.add(100.0, shared_tokens=50.0)
    assert room_of(window, tokens=100.0) == 8
    window.observe(ReplicaLoad(2, kv_tokens=300), ended=0)
    assert room_of(window, tokens=100.0) == 8
    window.observe(ReplicaLoad(2, kv_tokens=600), ended=0)
    assert room_of(window, tokens=100.0) == 5
    for _ in range(2):
        window.remove(100.0, shared_tokens=50.0)
    assert room_of(window, tokens=100.0) == 10


def test_one_generation_fits_however_large_it_is() -> None:
    assert room_of(ReplicaWindow(CAPACITY, 2.0), tokens=5000.0) == 1


def test_each_choice_of_a_call_takes_a_place() -> None:
    window = ReplicaWindow(CAPACITY, 2.0)
    window.add(8.0, sequences=8)
    assert room_of(window, tokens=1.0) == 12
    window.remove(8.0, sequences=8)
    assert (window.generations, room_of(window)) == (0, 20)


@pytest.mark.parametrize(("running", "has_room"), [(0, True), (1, True), (10, True), (11, False), (20, False)])
@pytest.mark.parametrize("choices", [10, 20, 128])
def test_a_call_of_more_choices_than_half_of_the_window_starts_when_half_of_it_is_free(
    choices: int, running: int, has_room: bool
) -> None:
    window = ReplicaWindow(CAPACITY, 2.0)
    for _ in range(running):
        window.add(1.0)
    assert window.has_room(1.0, choices) is has_room


def test_a_call_whose_choices_take_more_tokens_than_half_of_the_cache_starts_when_half_of_it_is_free() -> None:
    window = ReplicaWindow(CAPACITY, 2.0)
    window.add(500.0)
    assert window.has_room(5000.0, sequences=4)
    assert not window.has_room(5000.0)
    window.add(1.0)
    assert not window.has_room(5000.0, sequences=4)


def test_after_a_call_that_is_larger_than_the_window_nothing_starts_before_its_end() -> None:
    window = ReplicaWindow(CAPACITY, 2.0)
    window.add(1.0, sequences=128)
    assert not window.has_room(1.0)
    window.remove(1.0, sequences=128)
    assert room_of(window) == 20


def test_the_choices_of_a_call_are_not_taken_for_generations_of_others() -> None:
    window = ReplicaWindow(CAPACITY, 2.0)
    window.add(8.0, sequences=8)
    window.observe(ReplicaLoad(11, ingresses=2), ended=0)
    assert window.of_others == 3


def test_an_unknown_capacity_has_no_bound() -> None:
    assert room_of(ReplicaWindow(EngineCapacity.of(GeneratorDescription("m", 10, 10)), 2.0)) == 100


def test_the_capacity_is_that_of_the_description() -> None:
    described = GeneratorDescription("m", 10, 10, max_num_seqs=3, kv_cache_size_tokens=70)
    assert EngineCapacity.of(described) == EngineCapacity(sequences=3, kv_tokens=70)


def test_an_ingress_gets_what_the_others_leave() -> None:
    window = ReplicaWindow(CAPACITY, 2.0)
    assert window.observe(ReplicaLoad(ongoing_generations=6, ingresses=2), ended=0)
    assert (window.of_others, room_of(window)) == (6, 14)


def test_an_ingress_has_at_least_the_same_part_as_each_of_the_others() -> None:
    window = ReplicaWindow(CAPACITY, 2.0)
    window.observe(ReplicaLoad(ongoing_generations=20, ingresses=2), ended=0)
    assert (room_of(window), room_of(window, tokens=100.0)) == (10, 5)


def test_generations_of_this_ingress_are_none_of_others() -> None:
    window = ReplicaWindow(CAPACITY, 2.0)
    for _ in range(5):
        window.add(1.0)
    window.observe(ReplicaLoad(ongoing_generations=7, ingresses=2), ended=2)
    assert window.of_others == 4
    assert not window.observe(ReplicaLoad(ongoing_generations=7, ingresses=2), ended=2)


def test_the_only_ingress_has_the_whole_window_whatever_the_count_says() -> None:
    """What is sent and what has ended cross each other on the way: the count is not exact."""
    window = ReplicaWindow(CAPACITY, 2.0)
    window.observe(ReplicaLoad(ongoing_generations=9, ingresses=1), ended=0)
    assert (window.of_others, room_of(window)) == (0, 20)


def test_after_failures_without_a_success_one_generation_at_a_time_tries_the_replica() -> None:
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


def test_a_sequence_is_free_while_the_generations_of_all_are_fewer_than_the_batch() -> None:
    window = ReplicaWindow(CAPACITY, 2.0)
    window.observe(ReplicaLoad(ongoing_generations=8, ingresses=2), ended=0)
    window.add(1.0)
    assert (window.ongoing, window.has_free_sequence) == (9, True)
    window.add(1.0)
    assert (window.ongoing, window.has_free_sequence) == (10, False)


def test_a_larger_engine_makes_a_larger_window() -> None:
    window = ReplicaWindow(CAPACITY, 2.0)
    window.resize(EngineCapacity(sequences=30, kv_tokens=1000))
    assert room_of(window) == 60
