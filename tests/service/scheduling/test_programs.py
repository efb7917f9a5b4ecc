"""Rollouts of several turns keep places in a KV cache while their tools run: exact cases, and a fleet of programs."""

import random
from dataclasses import replace
from functools import partial

import pytest

from benchmarks.simulation.timing import Timing
from deployments.protocols.generation import GenerationRequest
from service.scheduling.affinity import Assignment
from service.scheduling.replicas import ReplicaQueues, RequestState, ScheduledGeneration
from service.scheduling.scheduler import GenerationScheduler
from service.scheduling.window import EngineCapacity, ReplicaWindow
from tests.service.scheduling.simulated_fleet import Batch, Fleet
from tests.service.scheduling.test_scheduler import generation, names, new_scheduler, rolling

MADE = 100
"""Tokens of each generation, of which no more are expected of one."""
CAPACITY = EngineCapacity(sequences=8, kv_tokens=2200)


def begun(scheduler: GenerationScheduler, *rollouts: str, of_request: str = "") -> None:
    """Plays the first turn of each rollout, which has 500 tokens then."""
    for name in rollouts:
        first = scheduler.submit(generation(name, of_request or name, prompt=400))
        assert first.has_started
        scheduler.end(first, MADE)


def back(scheduler: GenerationScheduler, name: str, of_request: str = "") -> ScheduledGeneration:
    return scheduler.submit(generation(name, of_request or name, turn=1, prompt=500))


def with_one_parked() -> tuple[GenerationScheduler, list[ScheduledGeneration], ScheduledGeneration]:
    """4 and 5 run with up to 600 tokens each, 2 and 3 are idle with 500 each, and 1 waits: 2,200 are in use."""
    scheduler = new_scheduler("a", capacity=CAPACITY)
    begun(scheduler, *"12345")
    running = [back(scheduler, name) for name in "45"]
    parked = back(scheduler, "1")
    assert ([each.has_started for each in (*running, parked)], scheduler.programs_at("a")) == (
        [True, True, False],
        (2, 1),
    )
    return scheduler, running, parked


def test_a_start_that_leaves_no_room_parks_the_rollout_that_is_idle_longest() -> None:
    scheduler = new_scheduler("a", capacity=CAPACITY)
    begun(scheduler, *"1234")
    assert scheduler.programs_at("a") == (4, 0)
    begun(scheduler, "5")
    assert scheduler.programs_at("a") == (4, 0)
    # What a start costs: 100 tokens, and a tenth of the prompt that is not there.
    assert [back(scheduler, name).cost for name in "51"] == [100, 150]


def test_a_parked_rollout_waits_until_it_fits_beside_the_others() -> None:
    scheduler, (fourth, fifth), parked = with_one_parked()
    assert list(scheduler.end(fourth, MADE)) == []
    assert scheduler.programs_at("a") == (3, 1)
    scheduler.release("4")
    assert list(scheduler.end(fifth, MADE)) == [parked]


def test_where_next_to_nothing_runs_nobody_waits_for_a_place() -> None:
    scheduler = new_scheduler("a", capacity=CAPACITY)
    begun(scheduler, *"12345")
    assert (back(scheduler, "1").has_started, scheduler.programs_at("a")) == (True, (3, 0))


def test_the_parked_of_a_request_come_back_in_order_and_before_those_that_have_not_begun() -> None:
    scheduler = new_scheduler("a", capacity=CAPACITY)
    begun(scheduler, *"12345", of_request="r")
    running = [back(scheduler, name, "r") for name in "45"]
    waiting = [back(scheduler, "1", "r"), scheduler.submit(generation("new", "r", prompt=500))]
    running.append(back(scheduler, "3", "r"))
    waiting.append(back(scheduler, "2", "r"))
    assert [each.has_started for each in running + waiting] == [True] * 3 + [False] * 3
    started = []
    for each in running:
        scheduler.release(each.request.rollout_id)
        started += names(scheduler.end(each, MADE))
    assert started == ["1", "2", "new"]


def test_a_request_of_single_turns_waits_for_no_program() -> None:
    scheduler, _, parked = with_one_parked()
    assert (back(scheduler, "unknown").has_started, parked.has_started) == (True, False)
    assert scheduler.programs_at("a") == (0, 1)


def test_first_turns_of_a_request_wait_for_places_once_one_of_its_rollouts_has_come_back() -> None:
    scheduler = new_scheduler("a", capacity=replace(CAPACITY, sequences=1))
    begun(scheduler, "r0", of_request="r")
    running = [scheduler.submit(generation(f"r{number}", "r", prompt=400)) for number in range(1, 7)]
    assert [each.has_started for each in running] == [True, True, False, False, False, False]
    assert scheduler.programs_at("a") == (1, 0)
    assert not back(scheduler, "r0", of_request="r").has_started
    assert scheduler.programs_at("a") == (0, 4)


def test_one_that_is_idle_while_others_wait_for_long_is_parked_for_them() -> None:
    scheduler, _, parked = with_one_parked()
    assert list(scheduler.let_others_pass()) == []
    assert list(scheduler.let_others_pass()) == [parked]
    assert scheduler.programs_at("a") == (0, 0)


def test_nobody_is_parked_for_being_idle_where_nobody_waits() -> None:
    scheduler = new_scheduler("a", capacity=CAPACITY)
    begun(scheduler, *"1234")
    assert [list(scheduler.let_others_pass()) for _ in range(5)] == [[]] * 5
    assert scheduler.programs_at("a") == (4, 0)


@pytest.mark.parametrize("replicas", [None, ["a"]])
def test_an_update_of_weights_ends_all_leases(replicas: list[str] | None) -> None:
    scheduler, _, parked = with_one_parked()
    assert list(scheduler.set_rolling(None if replicas is None else rolling(*replicas))) == [parked]
    assert scheduler.programs_at("a") == (0, 0)
    assert back(scheduler, "2").cost == 100 + 0.1 * 500


def test_a_replica_that_is_gone_keeps_no_places() -> None:
    scheduler, running, parked = with_one_parked()
    assert scheduler.set_replicas(["b"]) == [parked]
    assert (scheduler.programs_at("a"), parked.replica) == ((0, 0), "b")
    for each in running:
        scheduler.end(each, MADE)
    assert [back(scheduler, name).replica for name in "2345"] == ["b"] * 4


def test_a_parked_rollout_moves_to_a_replica_that_has_a_place() -> None:
    scheduler, _, parked = with_one_parked()
    assert scheduler.set_replicas(["a", "b"]) == [parked]
    assert (parked.replica, scheduler.programs_at("a"), scheduler.programs_at("b")) == ("b", (2, 0), (0, 0))


def test_the_prompt_that_a_group_shares_counts_once() -> None:
    scheduler = new_scheduler("a", capacity=CAPACITY)
    for number in range(17):
        first = scheduler.submit(generation(f"g{number}", f"{number}", prompt=400, group="g"))
        scheduler.end(first, MADE)
    # 500 tokens, and 100 of each other one.
    assert scheduler.programs_at("a") == (17, 0)


def test_a_generation_that_is_cancelled_leaves_its_rollout_the_place_that_it_had() -> None:
    scheduler = new_scheduler("a", capacity=replace(CAPACITY, sequences=1))
    begun(scheduler, "1")
    running = [scheduler.submit(generation(f"r{number}", "r", prompt=10)) for number in range(2)]
    waits = back(scheduler, "1")
    assert (waits.has_started, scheduler.programs_at("a")) == (False, (0, 0))
    scheduler.cancel(waits)
    assert scheduler.programs_at("a") == (1, 0)
    scheduler.release("1")
    assert (scheduler.programs_at("a"), [each.has_started for each in running]) == ((0, 0), [True, True])


def test_who_is_behind_the_others_by_a_turn_waits_for_no_place() -> None:
    scheduler, running, parked = with_one_parked()
    for number in range(60):
        short = scheduler.submit(generation(f"short{number}", "shorts", prompt=10))
        running += [short] if short.has_started else []
        running += scheduler.end(running.pop(0), MADE)
        if parked.has_started:
            break
    assert 10 < number < 59


def test_without_places_every_rollout_that_comes_back_starts_where_the_engine_has_room() -> None:
    scheduler = GenerationScheduler(2.0, random.Random(0), keeps_places=False)
    scheduler.set_capacity(CAPACITY)
    scheduler.set_replicas(["a"])
    begun(scheduler, *"12345")
    assert [back(scheduler, name).has_started for name in "451"] == [True] * 3
    assert scheduler.programs_at("a") == (0, 0)


def test_tokens_that_were_computed_before_are_counted_in_whole_blocks() -> None:
    scheduler = new_scheduler("a", capacity=replace(CAPACITY, block_tokens=16))
    begun(scheduler, "1")
    again = back(scheduler, "1")
    # Of 499 tokens, because the last one that was sampled was not computed.
    assert [again.recomputed(499, cached) for cached in (0, 480, 496)] == [496, 16, 0]
    assert again.recomputed(100, 0) == 96


def of_key(name: str, turn: int = 0, prompt: int = 10) -> GenerationRequest:
    """A generation of the request that is the name's first letter, all of one key."""
    request = generation(name, name[0], turn, prompt)
    return replace(request, share=replace(request.share, key="k"))


def test_requests_of_one_key_share_also_where_one_of_them_plays_programs() -> None:
    scheduler = new_scheduler("a", capacity=EngineCapacity(1, 10**6))
    running = [scheduler.submit(of_key("A0"))]
    scheduler.end(running.pop(), MADE)
    running = [scheduler.submit(of_key("A0", turn=1)), scheduler.submit(of_key("A1"))]
    for name in (*(f"A{number}" for number in range(2, 30)), *(f"B{number}" for number in range(5))):
        scheduler.submit(of_key(name))
    started = ""
    while running:
        running += (new := list(scheduler.end(running.pop(0), MADE)))
        started += "".join(each.request.rollout_id[0] for each in new)
    assert started[:10].count("B") >= 4


def test_a_parked_program_is_not_passed_by_another_one_of_its_key_for_ever() -> None:
    scheduler = new_scheduler("a", capacity=replace(CAPACITY, kv_tokens=2400))
    for name in ("B0", "A1", "A2", "A3", "A4"):
        scheduler.end(scheduler.submit(of_key(name, prompt=400)), MADE)
    running = [scheduler.submit(of_key(f"A{number}", 1, 500)) for number in range(1, 4)]
    parked = scheduler.submit(of_key("B0", 1, 500))
    for turn in range(2, 40):
        ended = running.pop(0)
        running += scheduler.end(ended, MADE)
        if parked.has_started:
            break
        running += [scheduler.submit(of_key(ended.request.rollout_id, turn, 500))]
    assert 2 < turn < 39


def test_the_prompt_of_a_group_counts_once_also_after_an_update_of_weights() -> None:
    scheduler = new_scheduler("a", capacity=EngineCapacity(16, 20_000))
    for turn in (0, 1):
        made = [generation(f"g{number}", "g", turn, 4000 + 200 * turn, group="g") for number in range(16)]
        started = [scheduler.submit(request) for request in made]
        assert [each.has_started for each in started] == [True] * 16
        for each in started:
            scheduler.end(each, MADE)
        scheduler.set_rolling(None)


def test_a_generation_that_goes_on_with_a_turn_makes_no_program_of_its_request() -> None:
    scheduler = new_scheduler("a", capacity=replace(CAPACITY, sequences=1))
    running = [scheduler.submit(generation(f"r{number}", "r", prompt=400)) for number in range(4)]
    scheduler.end(running[0], 5)
    scheduler.submit(generation("r0", "r", prompt=405))
    assert scheduler.programs_at("a")[1] == 0


def test_single_turns_move_to_a_replica_whose_longest_queue_is_of_parked_programs() -> None:
    scheduler = new_scheduler("a", "b", capacity=replace(CAPACITY, sequences=4))

    def at(replica: str, name: str, turn: int = 0, prompt: int = 500) -> ScheduledGeneration:
        request = generation(name, name[0], turn, prompt)
        return scheduler.submit(replace(request, replica=replica, max_new_tokens=1 if name[0] == "f" else 100))

    for number in range(5):
        scheduler.end(at("b", f"p{number}", prompt=400), MADE)
    for number in (4, 3, 0, *range(10, 40)):
        at("b", f"p{number}", number < 5)
    filling = [at("b", f"f{number}", prompt=1) for number in range(6)] + [at("a", f"s{n}", prompt=1) for n in range(8)]
    assert all(each.has_started for each in filling)
    waiting = [scheduler.submit(generation(f"t{number}", "t")) for number in range(12)]
    moved = [each for short in filling[:6] for each in scheduler.end(short, 1)]
    assert [each in waiting for each in moved] == [True] * 6
    assert scheduler.programs_at("b")[1] == 31


@pytest.mark.parametrize(("of_two", "next_one"), [(0.0, "short"), (4500.0, "parked")])
def test_a_parked_program_does_not_pass_a_policy_that_waits_for_its_adapter(of_two: float, next_one: str) -> None:
    queue, window = ReplicaQueues(), ReplicaWindow(EngineCapacity(4, 1000, adapters=1), 2.0)
    window.add(500, policy="one")
    waiting = (("parked", "one", 5000.0), ("blocked", "two", of_two), ("short", None, 10_000.0))
    for name, policy, virtual_time in waiting:
        flow = queue.flow(name, 1.0)
        flow.virtual_time = virtual_time
        asked = replace(generation(name, name, prompt=600), policy=policy)
        item = ScheduledGeneration(asked, RequestState(name, flow, None, 10.0), Assignment("a", name), replica="a")
        item.needs_place, item.kv_tokens = name == "parked", 600
        queue.wait(item, "a", 0)
    found = queue.next_at("a", window, leased=400, turn=1000, place_turn=1000)
    assert found is not None
    assert found.request.rollout_id == next_one


TIMING = Timing(time_per_token_s=0.01, max_num_seqs=64)


def test_where_the_cache_holds_all_programs_are_played_as_without_places() -> None:
    played = []
    for keeps_places in (True, False):
        fleet = Fleet(2, TIMING, kv_tokens=10**7, keeps_places=keeps_places)
        for number in range(40):
            batch = Batch(f"{number}", 1 + 10 * (number % 3), 6, tokens=50, prompt_tokens=500, tool_s=1.0)
            fleet.at(0.1 * number, partial(fleet.post, batch))
        fleet.run()
        played.append(fleet.turns_by_replica)
    assert len(played[0]) == 6 * sum(1 + 10 * (number % 3) for number in range(40))
    assert played[0] == played[1]


@pytest.mark.slow
def test_ten_thousand_programs_end_whatever_becomes_of_replicas_and_weights() -> None:
    fleet, draw = Fleet(4, TIMING, ingresses=2, kv_tokens=20_000), random.Random(0)
    for number in range(100):
        batch = Batch(f"{number}", 100, draw.randint(1, 6), tokens=20, ingress=number % 2, prompt_tokens=200)
        batch = replace(batch, tool_s=draw.choice([0.1, 1.0, 20.0]), key=draw.choice([None, "one", "other"]))
        fleet.at(number * 0.1, partial(fleet.post, batch))

    def change(number: int) -> None:
        kind = number % 4
        if kind < 2:
            fleet.replace(draw.choice(list(fleet.replicas)), f"new{number}", dies=kind == 0)
        elif kind == 2:
            fleet.pass_on(lambda scheduler: scheduler.set_rolling(None))
        fleet.pass_on(lambda scheduler: scheduler.let_others_pass())
        for scheduler in fleet.schedulers:
            most_parked.append(sum(scheduler.programs_at(replica)[1] for replica in fleet.replicas))
        if len(fleet.ended) < 100:
            fleet.at(fleet.now + 2.0, partial(change, number + 1))

    most_parked: list[int] = []
    fleet.at(1.0, partial(change, 0))
    fleet.run()
    assert (len(fleet.ended), [scheduler.waiting for scheduler in fleet.schedulers]) == (100, [0, 0])
    assert max(most_parked) > 100
    assert {scheduler.programs_at(name) for scheduler in fleet.schedulers for name in fleet.replicas} == {(0, 0)}
