"""Generations of priority `batch`: when they start, when they are parked, and laws over random sequences of events."""

import random
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.protocols.generation import GenerationRequest, RequestShare, SamplingOptions, ScoringRequest
from deployments.protocols.model_server import ServedRequest
from deployments.protocols.replicas import ReplicaLoad
from deployments.protocols.weight_versions import RollingActivation
from service.scheduling.gap_filling import BEHIND_OTHERS
from service.scheduling.generation_scheduler import GenerationScheduler
from service.scheduling.replica_queues import ScheduledGeneration
from service.scheduling.replica_window import SUSPECT_AFTER, EngineCapacity

SEQUENCES = 4
WINDOW = 8
PART = 0.5
BATCH = RequestShare("batch", 1 / 16, fills_gaps=True)
TRAIN = RequestShare("train")


def new_scheduler(*replicas: str, capacity: EngineCapacity | None = None, part: float = PART) -> GenerationScheduler:
    scheduler = GenerationScheduler(2.0, random.Random(0), part)
    scheduler.set_capacity(capacity or EngineCapacity(SEQUENCES))
    scheduler.set_replicas(replicas)
    return scheduler


def request_of(name: str, share: RequestShare, prompt: int = 10, policy: str | None = None) -> GenerationRequest:
    options = SamplingOptions()
    return GenerationRequest(name, range(prompt), 100, (), options, rollout_id=name, share=share, policy=policy)


def submit(
    scheduler: GenerationScheduler, count: int, share: RequestShare, policy: str | None = None
) -> list[ScheduledGeneration]:
    named = f"{share.id}{policy or ''}"
    return [scheduler.submit(request_of(f"{named}{number}", share, policy=policy)) for number in range(count)]


def names(generations: "object") -> list[str]:
    assert isinstance(generations, list | tuple)
    return [scheduled.request.rollout_id for scheduled in generations]


def started_of(generations: list[ScheduledGeneration]) -> int:
    return sum(each.has_started for each in generations)


def test_a_replica_that_runs_nothing_else_is_filled_to_the_places_of_its_engine() -> None:
    scheduler = new_scheduler("a")
    fillers = submit(scheduler, 6, BATCH)
    assert [each.has_started for each in fillers] == [True] * SEQUENCES + [False] * 2
    assert names(scheduler.end(fillers[0], 10)) == ["batch4"]


def test_beside_others_only_a_part_of_the_places_is_filled() -> None:
    scheduler = new_scheduler("a")
    submit(scheduler, 1, TRAIN)
    assert started_of(submit(scheduler, 4, BATCH)) == PART * SEQUENCES - 1


def test_with_a_part_of_0_nothing_starts_beside_others() -> None:
    scheduler = new_scheduler("a", part=0.0)
    [training] = submit(scheduler, 1, TRAIN)
    fillers = submit(scheduler, 4, BATCH)
    assert started_of(fillers) == 0
    assert names(scheduler.end(training, 10)) == [f"batch{number}" for number in range(4)]


def test_beside_others_only_a_part_of_the_kv_cache_is_filled() -> None:
    scheduler = new_scheduler("a", capacity=EngineCapacity(100, kv_tokens=600))
    submit(scheduler, 1, TRAIN)
    assert started_of(submit(scheduler, 4, BATCH)) == 1, "110 tokens each, and 300 that may be filled"


def test_when_others_come_the_youngest_are_parked_and_no_more_than_are_too_many() -> None:
    scheduler = new_scheduler("a")
    submit(scheduler, 4, BATCH)
    submit(scheduler, 1, TRAIN)
    assert names(scheduler.generations_to_park()) == ["batch3", "batch2", "batch1"]
    assert scheduler.generations_to_park() == [], "each once"


def test_one_that_was_parked_waits_for_the_next_gap_with_what_it_has() -> None:
    scheduler = new_scheduler("a")
    fillers = submit(scheduler, 3, BATCH)
    training = submit(scheduler, 2, TRAIN)
    parked = scheduler.generations_to_park()
    assert names(parked) == ["batch2", "batch1", "batch0"]
    for each in parked:
        assert scheduler.end(each, 5) == []
    again = scheduler.submit(request_of("batch0", BATCH, prompt=15))
    assert (again.has_started, again.replica, again.assignment.cached_tokens) == (False, "a", 15)
    assert names(scheduler.end(training[0], 50)) == ["batch0"]
    assert [each.is_parked for each in fillers] == [True] * 3


def test_others_start_at_once_whatever_fills_the_gaps_and_come_first_in_the_engine() -> None:
    scheduler = new_scheduler("a")
    fillers = submit(scheduler, 4, BATCH)
    training = submit(scheduler, WINDOW + 1, TRAIN)
    assert [each.has_started for each in training] == [True] * WINDOW + [False]
    assert min(each.virtual_time for each in fillers) >= BEHIND_OTHERS > max(each.virtual_time for each in training)
    scheduler.end(fillers[0], 100)
    assert scheduler.submit(request_of("later", RequestShare("later"))).virtual_time < BEHIND_OTHERS


def test_nothing_starts_in_a_gap_while_others_wait_for_another_replica_and_all_gaps_are_filled_after_that() -> None:
    scheduler = new_scheduler("a", "b")
    scheduler.set_rolling(RollingActivation(before=7, version=8, replicas=frozenset("b")))
    old = [
        scheduler.submit(replace(request_of(f"old{number}", TRAIN), weight_version=7)) for number in range(WINDOW + 1)
    ]
    new = scheduler.submit(replace(request_of("new", TRAIN), min_weight_version=8))
    fillers = submit(scheduler, 4, BATCH)
    assert (old[-1].has_started, started_of(fillers)) == (False, 0)
    assert names(scheduler.end(new, 10)) == []
    assert set(names(scheduler.end(old[0], 10))) == {"old8", *(f"batch{number}" for number in range(4))}
    assert {each.replica for each in fillers} == {"b"}


def test_a_call_of_an_api_and_a_score_are_not_parked() -> None:
    scheduler = new_scheduler("a")
    call = ServedRequest("call", range(10), 100, (), SamplingOptions(), rollout_id="call", share=BATCH)
    score = ScoringRequest("score", range(10), 1, (), SamplingOptions(), rollout_id="score", share=BATCH)
    assert [scheduler.submit(call).has_started, scheduler.submit(score).has_started] == [True, True]
    submit(scheduler, 1, BATCH)
    submit(scheduler, 4, TRAIN)
    assert names(scheduler.generations_to_park()) == ["batch0"]


def test_what_holds_the_places_of_adapters_is_parked_when_another_adapter_is_waited_for() -> None:
    scheduler = new_scheduler("a", capacity=EngineCapacity(SEQUENCES, adapters=1), part=1.0)
    fillers = submit(scheduler, 2, BATCH, policy="judge")
    [training] = submit(scheduler, 1, TRAIN, policy="run")
    assert not training.has_started
    assert names(scheduler.generations_to_park()) == ["batchjudge1", "batchjudge0"]
    assert scheduler.end(fillers[0], 1) == []
    assert names(scheduler.end(fillers[1], 1)) == ["trainrun0"]


def test_requests_share_the_gaps_by_their_weights() -> None:
    scheduler = new_scheduler("a", capacity=EngineCapacity(1))
    shares = [RequestShare(name, weight, fills_gaps=True) for name, weight in (("one", 1.0), ("three", 3.0))]
    running = [*submit(scheduler, 40, shares[0]), *submit(scheduler, 40, shares[1])][:1]
    ended = Counter[str]()
    for _ in range(40):
        ended[running[0].request.share.id] += 1
        running = list(scheduler.end(running[0], 100))
    assert ended["three"] / ended["one"] == pytest.approx(3, rel=0.2)


def test_where_others_leave_no_gap_one_at_a_time_starts_in_turn_with_them() -> None:
    scheduler = new_scheduler("a")
    submit(scheduler, 2 * WINDOW, TRAIN)
    fillers = submit(scheduler, 3, BATCH)
    [started] = scheduler.start_starved()
    assert (started, started.virtual_time < BEHIND_OTHERS) == (fillers[0], True)
    assert (scheduler.start_starved(), scheduler.generations_to_park()) == ((), [])
    scheduler.end(started, 100)
    assert scheduler.start_starved() == (), "one has run since the last call"
    assert names(scheduler.start_starved()) == ["batch1"]


def test_other_ingress_replicas_are_seen_with_what_fills_gaps_apart() -> None:
    scheduler = new_scheduler("a")
    submit(scheduler, 2, BATCH)
    scheduler.observe("a", ReplicaLoad(5, ingresses=2, filling_generations=4), ended=0)
    assert names(scheduler.generations_to_park()) == ["batch1", "batch0"], "one of the others' fills no gap"
    assert scheduler.submit(request_of("train", TRAIN)).has_started


def test_a_suspect_replica_fills_no_gap_and_is_tried_by_what_waits() -> None:
    scheduler = new_scheduler("a")
    for each in submit(scheduler, SUSPECT_AFTER, TRAIN):
        scheduler.end(each, replica_failed=True)
    [filler] = submit(scheduler, 1, BATCH)
    assert not filler.has_started
    assert names(scheduler.try_suspects()) == ["batch0"]
    scheduler.end(filler, 10)
    assert not scheduler.has_suspects


def test_what_waits_for_a_replica_that_is_gone_fills_the_gaps_of_others() -> None:
    scheduler = new_scheduler("a")
    fillers = submit(scheduler, 6, BATCH)
    assert names(scheduler.set_replicas(["b"])) == ["batch4", "batch5"]
    assert scheduler.end(fillers[0], replica_failed=True) == ()


@dataclass
class Events:
    """Plays random events and checks the laws after each."""

    scheduler: GenerationScheduler = field(default_factory=lambda: new_scheduler("0", "1"))
    replicas: list[str] = field(default_factory=lambda: ["0", "1"])
    waiting: list[ScheduledGeneration] = field(default_factory=list)
    running: list[ScheduledGeneration] = field(default_factory=list)
    parked: list[ScheduledGeneration] = field(default_factory=list)
    submitted: int = 0
    over: int = 0

    def play(self, event: str, pick: int) -> None:
        if event in ("train", "batch"):
            share = TRAIN if event == "train" else replace(BATCH, id=f"batch {pick % 2}")
            policy = f"p{pick % 3}" if pick % 5 == 0 else None
            self.submit(request_of(f"{self.submitted}", share, 10 + pick, policy))
            self.submitted += 1
        elif event in ("end", "fail") and self.running:
            ended = self.running.pop(pick % len(self.running))
            failed = event == "fail"
            self.note(self.scheduler.end(ended, None if failed else pick, replica_failed=failed))
            if ended in self.parked and not failed:
                self.parked.remove(ended)
                self.submit(replace(ended.request, prompt_token_ids=range(len(ended.request.prompt_token_ids) + pick)))
            else:
                self.scheduler.release(ended.request.rollout_id)
                self.over += 1
        elif event == "cancel" and self.waiting:
            cancelled = self.waiting.pop(pick % len(self.waiting))
            self.note(self.scheduler.cancel(cancelled))
            self.scheduler.release(cancelled.request.rollout_id)
            self.over += 1
        elif event == "scale":
            self.replicas = [f"{number}" for number in range(pick % 4, pick % 4 + 1 + pick % 3)]
            self.note(self.scheduler.set_replicas(self.replicas))
        elif event == "try":
            self.note(self.scheduler.try_suspects())
        elif event == "roll":
            rolled = RollingActivation(before=7, version=8, replicas=frozenset({f"{pick % 3}"}))
            self.note(self.scheduler.set_rolling(rolled if pick % 2 else None))
        elif event == "starve":
            self.note(self.scheduler.start_starved(), in_gap=False)
        self.parked += self.scheduler.generations_to_park()

    def submit(self, request: GenerationRequest) -> None:
        scheduled = self.scheduler.submit(request)
        if not scheduled.has_started:
            self.waiting.append(scheduled)
            return
        self.running.append(scheduled)
        if request.share.fills_gaps:
            self.check_start(scheduled)

    def note(self, started: object, in_gap: bool = True) -> None:
        assert isinstance(started, list | tuple)
        for scheduled in started:
            self.waiting.remove(scheduled)
            self.running.append(scheduled)
        for scheduled in started:
            if in_gap and scheduled.request.share.fills_gaps:
                self.check_start(scheduled)

    def check_start(self, filler: ScheduledGeneration) -> None:
        assert filler.fills_gap
        assert not any(not each.request.share.fills_gaps for each in self.waiting), "another one waits"
        here = [each for each in self.running if each.replica == filler.replica and each.window is filler.window]
        others = sum(not each.request.share.fills_gaps for each in here)
        assert len(here) <= (PART if others else 1) * SEQUENCES or len(here) == 1

    def check(self) -> None:
        assert len(self.waiting) + len(self.running) + self.over == self.submitted
        assert self.scheduler.waiting == len(self.waiting)
        assert all(scheduled.has_started for scheduled in self.running)
        assert not any(scheduled.has_started for scheduled in self.waiting)
        assert {scheduled.replica for scheduled in self.waiting} <= set(self.replicas)
        assert len(self.parked) == len(set(self.parked))


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["train", "batch", "batch", "end", "end", "fail", "cancel", "scale", "roll", "starve", "try"]),
        st.integers(0, 60),
    ),
    max_size=150,
)


@given(events=EVENTS)
def test_nothing_is_lost_and_none_starts_in_a_gap_that_another_waits_for(events: list[tuple[str, int]]) -> None:
    played = Events()
    for event, pick in events:
        played.play(event, pick)
        played.check()


@given(events=EVENTS)
def test_whatever_happened_all_that_waits_starts_once_the_others_end(events: list[tuple[str, int]]) -> None:
    played = Events()
    for event, pick in events:
        played.play(event, pick)
    while played.running:
        played.play("end", 0)
        played.check()
    assert played.waiting == []
    gaps = played.scheduler._gaps
    assert (gaps._filling, gaps.requests._requests, gaps.queue._flows, gaps.queue._lanes) == ({},) * 4


@st.composite
def two_runs(draw: st.DrawFn) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """Events with and without what fills gaps."""
    events = draw(st.lists(st.tuples(st.sampled_from(["train", "end", "scale"]), st.integers(0, 60)), max_size=60))
    return events, draw(st.lists(st.tuples(st.just("batch"), st.integers(0, 60)), max_size=60))


@given(events=two_runs(), seed=st.integers(0, 1000))
def test_others_start_at_the_same_moments_and_places_with_and_without_what_fills_gaps(
    events: tuple[list[tuple[str, int]], list[tuple[str, int]]], seed: int
) -> None:
    """But for named policies, whose adapters a batch may hold until it is parked."""
    others, fillers = events
    placed = []
    for is_shared in (False, True):
        scheduler, draw = new_scheduler("0", "1"), random.Random(seed)
        running: list[ScheduledGeneration] = []
        trace: list[tuple[str, str]] = []

        def note(started: object, running: list[ScheduledGeneration] = running) -> None:
            assert isinstance(started, list | tuple)
            running += [each for each in started if not each.request.share.fills_gaps]

        for number, (event, pick) in enumerate(others):
            if is_shared and number < len(fillers) and draw.random() < 0.7:
                scheduler.submit(request_of(f"f{number}", BATCH, 10 + fillers[number][1]))
            if event == "train":
                scheduled = scheduler.submit(request_of(f"{number}", TRAIN, 10 + pick))
                running += [scheduled] if scheduled.has_started else []
            elif event == "end" and running:
                ended = running.pop(pick % len(running))
                note(scheduler.end(ended, pick))
            elif event == "scale":
                note(scheduler.set_replicas([f"{one}" for one in range(1 + pick % 3)]))
            trace += [(each.request.rollout_id, each.replica) for each in running]
        placed.append(trace)
    assert placed[0] == placed[1]
