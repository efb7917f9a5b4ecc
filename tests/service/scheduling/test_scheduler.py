"""Which generation starts when, and where: exact cases, and laws over random sequences of events."""

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from deployments.protocols.generation import GenerationRequest, RequestShare, SamplingOptions, ScoringRequest
from deployments.protocols.model_server import ServedRequest
from deployments.protocols.replicas import ReplicaLoad
from deployments.protocols.weight_versions import RollingActivation
from service.scheduling.affinity import Assignment
from service.scheduling.fair_queue import Flow
from service.scheduling.replicas import (
    FIRST_EXPECTED_TOKENS,
    LEARNING_RATE,
    PREFILL_COST,
    UNKNOWN_REPLICA,
    RequestState,
    ScheduledGeneration,
)
from service.scheduling.scheduler import GenerationScheduler
from service.scheduling.window import SUSPECT_AFTER, EngineCapacity
from tests.kept_objects import kept

SEQUENCES = 2
WINDOW = 4


def new_scheduler(*replicas: str, capacity: EngineCapacity | None = None) -> GenerationScheduler:
    scheduler = GenerationScheduler(2.0, random.Random(0))
    scheduler.set_capacity(capacity or EngineCapacity(SEQUENCES))
    scheduler.set_replicas(replicas)
    return scheduler


def generation(
    rollout: str, of_request: str = "r", turn: int = 0, prompt: int = 10, group: str = "", weight: float = 1.0
) -> GenerationRequest:
    return GenerationRequest(
        f"{rollout}-{turn}",
        range(prompt),
        100,
        (),
        SamplingOptions(),
        rollout_id=rollout,
        group=group or rollout,
        turn=turn,
        share=RequestShare(of_request, weight),
    )


def submit_many(
    scheduler: GenerationScheduler, count: int, of_request: str = "r", turn: int = 0
) -> list[ScheduledGeneration]:
    return [scheduler.submit(generation(f"{of_request}{number}", of_request, turn)) for number in range(count)]


def with_generations(count: int, *replicas: str) -> tuple[GenerationScheduler, list[ScheduledGeneration]]:
    scheduler = new_scheduler(*replicas)
    return scheduler, submit_many(scheduler, count)


def names(generations: "list[ScheduledGeneration] | object") -> list[str]:
    assert isinstance(generations, list | tuple)
    return [scheduled.request.rollout_id for scheduled in generations]


def test_waiting_generations_are_counted_by_the_weight_of_their_request() -> None:
    scheduler = new_scheduler("a")
    for number in range(WINDOW + 3):
        scheduler.submit(generation(f"t{number}", "train"))
    first = scheduler.submit(generation("i", "interactive", weight=16.0))
    assert scheduler.waiting_by_weight == {1.0: 3, 16.0: 1}
    scheduler.cancel(first)
    assert scheduler.waiting_by_weight == {1.0: 3}


def call_of(choices: int, name: str = "call") -> ServedRequest:
    share = RequestShare(name)
    return ServedRequest(name, range(10), 100, (), SamplingOptions(), rollout_id=name, share=share, choices=choices)


SCORED = ScoringRequest("s", range(300), 1, (), SamplingOptions(), rollout_id="s", share=RequestShare("scores"))
LEARNED_OF_A_CALL = FIRST_EXPECTED_TOKENS + LEARNING_RATE * (10 - FIRST_EXPECTED_TOKENS)


@pytest.mark.parametrize(
    ("asked", "prompt", "made", "ended_with", "expected"),
    [(SCORED, 300, 1, 0, FIRST_EXPECTED_TOKENS), (call_of(5), 10, 5 * 100, 50, LEARNED_OF_A_CALL)],
)
def test_scores_and_calls_are_charged_for_their_prompt_and_all_choices(
    asked: GenerationRequest, prompt: int, made: int, ended_with: int, expected: float
) -> None:
    scheduler = new_scheduler("a")
    scheduled = scheduler.submit(asked)
    assert (scheduled.cost, scheduled.kv_tokens) == (made + PREFILL_COST * prompt, made + prompt)
    scheduler.end(scheduled, new_tokens=ended_with)
    # A score teaches nothing of lengths, and a call the mean of its choices.
    new = replace(generation("new", "new", prompt=0), max_new_tokens=10**6)
    assert scheduler.submit(new).cost == pytest.approx(expected)


def test_a_call_takes_a_place_of_the_window_for_each_of_its_choices() -> None:
    scheduler = new_scheduler("a")
    call = scheduler.submit(call_of(3))
    assert [each.has_started for each in (call, *submit_many(scheduler, 3))] == [True, True, False, False]
    assert scheduler.waiting_for("a") == 2
    assert names(scheduler.end(call, new_tokens=300)) == ["r1", "r2"]
    assert (scheduler.submit(call_of(128, "large")).has_started, scheduler.waiting_for("a")) == (False, 128)


def test_without_a_window_every_generation_starts_at_once() -> None:
    scheduler = GenerationScheduler(None)
    scheduler.set_capacity(EngineCapacity(SEQUENCES))
    scheduler.set_replicas(["a"])
    assert {(scheduled.has_started, scheduled.virtual_time) for scheduled in submit_many(scheduler, 50)} == {(True, 0)}


def test_a_rollout_that_has_begun_goes_before_one_that_has_not() -> None:
    scheduler = new_scheduler("a")
    running = submit_many(scheduler, 4)
    submit_many(scheduler, 2, "r", turn=0)
    scheduler.submit(generation("begun", turn=3))
    assert names(scheduler.end(running[0])) == ["begun"]


def test_virtual_time_advances_by_the_tokens_that_are_charged() -> None:
    scheduler = new_scheduler("a")
    first, second = (scheduler.submit(generation(name, prompt=50, weight=2.0)) for name in ("one", "two"))
    assert (first.virtual_time, second.virtual_time) == (0, int((100 + PREFILL_COST * 50) / 2.0))


def test_cached_tokens_cost_nothing() -> None:
    scheduler = new_scheduler("a")
    first = scheduler.submit(generation("one", prompt=1000))
    scheduler.end(first, new_tokens=100)
    second = scheduler.submit(generation("one", prompt=1150, turn=1))
    assert (first.cost, second.cost) == (100 + PREFILL_COST * 1000, 100 + PREFILL_COST * 50)


def test_a_request_is_charged_the_mean_of_its_own_lengths() -> None:
    scheduler = new_scheduler("a")
    for number in range(200):
        scheduler.end(scheduler.submit(generation(f"{number}", "short", prompt=0)), new_tokens=10)
    assert scheduler.submit(generation("short", "short", prompt=0)).cost == pytest.approx(10.0, abs=0.1)
    assert scheduler.submit(generation("other", "long", prompt=0)).cost == pytest.approx(10.0, abs=0.1)
    assert new_scheduler("a").submit(generation("one", prompt=0)).cost == min(FIRST_EXPECTED_TOKENS, 100)


def test_what_a_group_shares_counts_once() -> None:
    scheduler = new_scheduler("a", capacity=EngineCapacity(10, kv_tokens=1500))
    generations = [scheduler.submit(generation(f"{number}", group="g", prompt=1000)) for number in range(6)]
    assert [scheduled.has_started for scheduled in generations] == [True] * 5 + [False]


def test_a_rollout_stays_on_its_replica_while_that_has_a_free_sequence() -> None:
    scheduler = new_scheduler("a", "b")
    first = scheduler.submit(generation("one"))
    scheduler.end(first, new_tokens=100)
    assert scheduler.submit(generation("other")).replica == {"a": "b", "b": "a"}[first.replica]
    assert scheduler.submit(generation("one", turn=1, prompt=110)).replica == first.replica


def two_begun(scheduler: GenerationScheduler, prompt: int) -> None:
    """Lets two rollouts play their first turn on the only replica, and then fills its window."""
    for scheduled in [scheduler.submit(generation(name, prompt=prompt)) for name in ("one", "two")]:
        scheduler.end(scheduled, new_tokens=100)
    submit_many(scheduler, WINDOW)


@pytest.mark.parametrize(("prompt", "replica"), [(500, "b"), (50_000, "a")])
def test_a_rollout_moves_when_the_wait_is_worth_more_than_its_prefix(prompt: int, replica: str) -> None:
    """Three generations must end on `a` before another one can run there: 1.5 lengths of 100 tokens or less."""
    scheduler = new_scheduler("a")
    two_begun(scheduler, prompt)
    scheduler.set_replicas(["a", "b"])
    assert scheduler.submit(generation("one", turn=1, prompt=prompt + 100)).replica == replica


def test_a_new_replica_takes_waiting_generations_without_a_prefix_first() -> None:
    scheduler = new_scheduler("a")
    two_begun(scheduler, prompt=500)
    waiting = [scheduler.submit(generation("one", turn=1, prompt=600)), *submit_many(scheduler, 6, "r", turn=0)]
    started = scheduler.set_replicas(["a", "b"])
    assert [scheduled.replica for scheduled in started] == ["b"] * WINDOW
    assert waiting[0] not in started


def test_while_no_replica_is_known_there_is_one_window() -> None:
    scheduler = new_scheduler()
    generations = submit_many(scheduler, 6)
    assert [scheduled.replica for scheduled in generations if scheduled.has_started] == [UNKNOWN_REPLICA] * WINDOW
    assert names(scheduler.set_replicas(["a"])) == ["r4", "r5"]


def test_what_waits_for_a_replica_that_keeps_failing_goes_elsewhere() -> None:
    scheduler, generations = with_generations(30, "a", "b")
    on_a = [each for each in generations if each.replica == "a" and each.has_started]
    for scheduled in on_a[: SUSPECT_AFTER - 1]:
        scheduler.end(scheduled, replica_failed=True)
    assert {each.replica for each in generations if not each.has_started} == {"a", "b"}
    scheduler.end(on_a[SUSPECT_AFTER - 1], replica_failed=True)
    assert {each.replica for each in generations if not each.has_started and each not in on_a} == {"b"}
    assert {scheduler.submit(generation(f"new {number}")).replica for number in range(10)} == {"b"}


def with_suspect_a() -> tuple[GenerationScheduler, list[ScheduledGeneration]]:
    """Replica `a` has failed all of its generations. Returns those that run on `b`."""
    scheduler, generations = with_generations(2 * WINDOW, "a", "b")
    for scheduled in generations:
        if scheduled.replica == "a":
            scheduler.end(scheduled, replica_failed=True)
    return scheduler, [scheduled for scheduled in generations if scheduled.replica == "b"]


def test_the_oldest_generation_that_waits_tries_a_suspect_replica() -> None:
    scheduler, _ = with_suspect_a()
    waiting = submit_many(scheduler, 3, "s")
    assert [each.has_started for each in waiting] == [False] * 3
    assert names(scheduler.let_try("a")) == ["s0"]
    assert (waiting[0].replica, waiting[0].has_started) == ("a", True)
    assert list(scheduler.let_try("a")) == [], "one at a time"
    assert not scheduler.submit(generation("next")).has_started


def test_after_a_try_that_was_cancelled_the_next_generation_tries() -> None:
    scheduler, on_b = with_suspect_a()
    scheduler.end(on_b[0], new_tokens=100)
    scheduler.let_try("a")
    scheduler.end(scheduler.submit(generation("cancelled")))
    assert scheduler.submit(generation("next")).replica == "a"


@pytest.mark.parametrize(("failed", "replicas"), [(False, {"a", "b"}), (True, {"b"})])
def test_a_suspect_replica_gets_its_part_again_after_a_success(failed: bool, replicas: set[str]) -> None:
    scheduler, _ = with_suspect_a()
    waiting = submit_many(scheduler, 3, "s")
    [tried] = scheduler.let_try("a")
    started = scheduler.end(tried, None if failed else 100, replica_failed=failed)
    assert names(started) == ([] if failed else ["s2", "s1"])
    assert {each.replica for each in waiting[1:]} == ({"b"} if failed else {"a"})
    assert {scheduler.submit(generation(f"new {number}")).replica for number in range(6)} == replicas


def test_a_suspect_replica_that_is_gone_is_not_tried() -> None:
    scheduler, _ = with_suspect_a()
    scheduler.let_try("a")
    scheduler.set_replicas(["b"])
    assert scheduler.submit(generation("next")).replica == "b"
    scheduler.set_replicas(["a", "b"])
    assert scheduler.submit(generation("another")).replica == "a", "it is new"


def test_requests_begin_at_the_highest_time_that_ended_or_was_reported() -> None:
    scheduler = new_scheduler("a")
    for number in range(3):
        scheduler.end(scheduler.submit(generation(f"{number}", prompt=0)), new_tokens=100)
    assert scheduler.submit(generation("other", "other")).virtual_time == 200
    for reported in (5000, 10):
        scheduler.observe("a", ReplicaLoad(0, virtual_time=reported), ended=0)
    assert scheduler.submit(generation("later", "later")).virtual_time == 5000


def test_a_small_generation_does_not_overtake_a_large_one() -> None:
    scheduler = new_scheduler("a", capacity=EngineCapacity(10, kv_tokens=1000))
    running, large, small = (scheduler.submit(generation(name, prompt=tokens)) for name, tokens in PROMPTS.items())
    assert [each.has_started for each in (running, large, small)] == [True, False, False]
    assert names(scheduler.end(running, new_tokens=100)) == ["large", "small"]


PROMPTS = {"running": 300, "large": 700, "small": 10}


def test_a_replica_that_is_listed_again_still_has_its_generations() -> None:
    scheduler = new_scheduler("a")
    running = submit_many(scheduler, WINDOW)
    scheduler.set_replicas(["b"])
    scheduler.set_replicas(["a", "b"])
    assert {each.replica for each in submit_many(scheduler, 8, "s") if each.has_started} == {"b"}
    assert [started.replica for started in scheduler.end(running[0], new_tokens=100)] == ["a"]


def test_a_rollout_leaves_a_replica_that_keeps_failing_others() -> None:
    scheduler = new_scheduler("a")
    scheduler.end(scheduler.submit(generation("one")), new_tokens=100)
    failing = submit_many(scheduler, SUSPECT_AFTER)
    scheduler.set_replicas(["a", "b"])
    for scheduled in failing:
        scheduler.end(scheduled, replica_failed=True)
    assert {each.replica for each in submit_many(scheduler, WINDOW, "s")} == {"b"}
    again = scheduler.submit(generation("one", turn=1, prompt=110))
    assert (again.replica, again.has_started) == ("b", False)


def test_new_rollouts_go_where_other_ingresses_have_fewer_generations() -> None:
    scheduler = new_scheduler("a", "b", capacity=EngineCapacity(100))
    scheduler.observe("a", ReplicaLoad(ongoing_generations=5, ingresses=2), ended=0)
    assert [each.replica for each in submit_many(scheduler, 5)] == ["b"] * 5


def test_a_load_without_generations_that_have_ended_here_is_that_of_others() -> None:
    scheduler = new_scheduler("a", capacity=EngineCapacity(100))
    submit_many(scheduler, 5)
    scheduler.set_replicas(["a", "b"])
    scheduler.observe("a", ReplicaLoad(ongoing_generations=5, ingresses=2), ended=5)
    assert [each.replica for each in submit_many(scheduler, 9, "s")] == ["b"] * 9


def test_when_all_rollouts_are_released_nothing_is_kept() -> None:
    scheduler, before = new_scheduler("a", "b"), kept(RequestState, Flow, Assignment)
    for scheduled in submit_many(scheduler, 12):
        if scheduled.has_started:
            scheduler.end(scheduled, new_tokens=5)
        else:
            scheduler.cancel(scheduled)
        scheduler.release(scheduled.request.rollout_id)
    del scheduled
    scheduler.release("unknown")
    assert (scheduler.waiting, kept(RequestState, Flow, Assignment)) == (0, before)


class Scheduling(RuleBasedStateMachine):
    """Generations of three requests on replicas that come, go and fail, whatever happens in which order."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = new_scheduler("0", "1", capacity=EngineCapacity(SEQUENCES, kv_tokens=300))
        self.replicas = ["0", "1"]
        self.waiting: list[ScheduledGeneration] = []
        self.running: list[ScheduledGeneration] = []
        self.idle: list[ScheduledGeneration] = []
        """The last turns of rollouts that may come back."""
        self.submitted = self.over = 0

    def submit(self, request: GenerationRequest) -> None:
        scheduled = self.scheduler.submit(request)
        self.submitted += 1
        (self.running if scheduled.has_started else self.waiting).append(scheduled)

    @rule(of_request=st.integers(0, 2), turn=st.integers(0, 3), group=st.integers(0, 6))
    def submit_generation(self, of_request: int, turn: int, group: int) -> None:
        self.submit(generation(f"{self.submitted}", f"request {of_request}", turn=turn, group=f"{group}"))

    @rule(choices=st.integers(1, 7))
    def submit_call(self, choices: int) -> None:
        self.submit(call_of(choices, f"{self.submitted}"))

    @precondition(lambda self: self.running)
    @rule(pick=st.integers(0), new_tokens=st.none() | st.integers(0, 60))
    def end(self, pick: int, new_tokens: int | None) -> None:
        """Args: `new_tokens` are None if its replica fails."""
        ended = self.running.pop(pick % len(self.running))
        self.note(self.scheduler.end(ended, new_tokens, replica_failed=new_tokens is None))
        self.over += 1
        self.idle.append(ended)

    @precondition(lambda self: self.idle)
    @rule(pick=st.integers(0), comes_back=st.booleans())
    def after_its_tool(self, pick: int, comes_back: bool) -> None:
        before = self.idle.pop(pick % len(self.idle)).request
        if comes_back and not isinstance(before, ServedRequest):
            prompt = range(len(before.prompt_token_ids) + 20)
            self.submit(replace(before, prompt_token_ids=prompt, turn=before.turn + 1))
        else:
            self.scheduler.release(before.rollout_id)

    @rule()
    def let_others_pass(self) -> None:
        self.note(self.scheduler.let_others_pass())

    @rule()
    def change_weights(self) -> None:
        self.note(self.scheduler.set_rolling(None))
        assert self.kept_at_all_replicas() == 0

    def kept_at_all_replicas(self) -> int:
        return sum(self.scheduler.programs_at(f"{number}")[0] for number in range(6))

    @precondition(lambda self: self.waiting)
    @rule(pick=st.integers(0))
    def cancel(self, pick: int) -> None:
        cancelled = self.waiting.pop(pick % len(self.waiting))
        self.scheduler.cancel(cancelled)
        self.over += 1
        self.idle.append(cancelled)

    @rule(first=st.integers(0, 3), count=st.integers(1, 3))
    def scale(self, first: int, count: int) -> None:
        self.replicas = [f"{number}" for number in range(first, first + count)]
        self.note(self.scheduler.set_replicas(self.replicas))

    @rule(replica=st.integers(0, 3))
    def let_try(self, replica: int) -> None:
        self.note(self.scheduler.let_try(f"{replica}"))

    @rule(replica=st.integers(0, 3), ongoing=st.integers(0, 60), ingresses=st.integers(1, 3))
    def observe(self, replica: int, ongoing: int, ingresses: int) -> None:
        load = ReplicaLoad(ongoing, ingresses=ingresses, virtual_time=ongoing)
        self.note(self.scheduler.observe(f"{replica}", load, ended=0))

    def note(self, started: "list[ScheduledGeneration] | object") -> None:
        assert isinstance(started, list | tuple)
        for scheduled in started:
            self.waiting.remove(scheduled)
            self.running.append(scheduled)

    @invariant()
    def no_more_places_are_kept_than_there_are_idle_rollouts(self) -> None:
        assert self.kept_at_all_replicas() <= len(self.idle)

    @invariant()
    def nothing_is_lost_or_started_twice(self) -> None:
        assert len(self.waiting) + len(self.running) + self.over == self.submitted
        assert self.scheduler.waiting == len(self.waiting)
        assert all(scheduled.has_started for scheduled in self.running)
        assert not any(scheduled.has_started for scheduled in self.waiting)
        assert {scheduled.replica for scheduled in self.waiting} <= set(self.replicas)

    @invariant()
    def no_window_is_exceeded(self) -> None:
        ongoing, largest = Counter[str](), Counter[str]()
        for scheduled in self.running:
            ongoing[scheduled.replica] += scheduled.sequences
            largest[scheduled.replica] = max(largest[scheduled.replica], scheduled.sequences)
        assert all(count <= WINDOW + max(largest[name] - WINDOW // 2, 0) for name, count in ongoing.items())

    def teardown(self) -> None:
        """All that waits starts once the others end."""
        while self.running:
            self.end(0, 0)
            self.nothing_is_lost_or_started_twice()
            self.no_window_is_exceeded()
        assert self.waiting == []
        while self.idle:
            self.after_its_tool(0, comes_back=False)
        assert self.kept_at_all_replicas() == 0


TestScheduling = Scheduling.TestCase


def rolling(*replicas: str) -> RollingActivation:
    return RollingActivation(before=7, version=8, replicas=frozenset(replicas))


def demanding(rollout: str, **demands: int) -> GenerationRequest:
    return replace(generation(rollout), **demands)  # type: ignore[arg-type]


def test_a_minimum_goes_to_a_replica_that_has_it() -> None:
    scheduler = new_scheduler("a", "b", "c")
    scheduler.set_rolling(rolling("b"))
    new = [scheduler.submit(demanding(f"new{number}", min_weight_version=8)) for number in range(3)]
    assert {each.replica for each in new} == {"b"}
    assert {scheduler.submit(generation(f"any{number}")).replica for number in range(4)} == {"a", "c"}


def test_an_exact_version_stays_with_replicas_that_have_it_still() -> None:
    scheduler = new_scheduler("a", "b")
    first = scheduler.submit(demanding("pinned", weight_version=7))
    scheduler.end(first, new_tokens=10)
    scheduler.set_rolling(rolling(first.replica))
    again = scheduler.submit(replace(demanding("pinned", weight_version=7), turn=1))
    assert {first.replica, again.replica} == {"a", "b"}


def test_a_generation_that_waits_for_a_changing_replica_starts_elsewhere() -> None:
    scheduler = new_scheduler("a", "b")
    scheduler.set_rolling(rolling())
    busy = submit_many(scheduler, 2 * WINDOW)
    pinned = [scheduler.submit(demanding(f"pinned{number}", weight_version=7)) for number in range(2)]
    assert not any(each.has_started for each in pinned)
    assert list(scheduler.set_rolling(rolling("a"))) == []
    assert {each.replica for each in pinned} == {"b"}
    [at_b] = [each for each in busy if each.replica == "b"][:1]
    assert names(list(scheduler.end(at_b, new_tokens=10))) == ["pinned0"]
    [at_a] = [each for each in busy if each.replica == "a"][:1]
    assert names(list(scheduler.end(at_a, new_tokens=10))) == []


def test_where_no_replica_has_a_version_one_is_asked_all_the_same() -> None:
    scheduler = new_scheduler("a")
    scheduler.set_rolling(rolling("a"))
    assert scheduler.submit(demanding("pinned", weight_version=7)).replica == "a"


def test_after_the_last_replica_every_generation_goes_anywhere_again() -> None:
    scheduler = new_scheduler("a", "b")
    scheduler.set_rolling(rolling("b"))
    scheduler.set_rolling(None)
    new = [scheduler.submit(demanding(f"new{number}", min_weight_version=8)) for number in range(2)]
    assert {each.replica for each in new} == {"a", "b"}
