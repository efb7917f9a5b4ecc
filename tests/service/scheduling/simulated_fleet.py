"""A scheduler over simulated engines in virtual time, without an event loop: what it decides takes no time."""

import heapq
import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from benchmarks.simulation.timing import TimedGenerations, Timing
from deployments.protocols.generation import GenerationRequest, RequestShare, SamplingOptions
from deployments.protocols.replicas import ReplicaLoad
from service.scheduling.replicas import ScheduledGeneration
from service.scheduling.scheduler import GenerationScheduler
from service.scheduling.window import EngineCapacity

ROUND_TRIP_S = 0.005
"""Between the end of a generation and the next turn of its rollout."""


@dataclass(frozen=True)
class Batch:
    """One request: `rollouts` rollouts of `turns` turns of `tokens` tokens each, or of up to half fewer."""

    name: str
    rollouts: int
    turns: int
    tokens: int = 100
    weight: float = 1.0
    ingress: int = 0
    prompt_tokens: int = 10
    policy: str | None = None
    key: str | None = None
    key_weight: float = 1.0
    tool_s: float = 0.0
    """Mean time from a turn to the next one, beside `ROUND_TRIP_S`; drawn for each turn."""


@dataclass(eq=False)
class Replica:
    """One engine, and what it reports."""

    name: str
    timing: Timing
    engine: "TimedGenerations[ScheduledGeneration]" = field(init=False)
    ingress_of: dict[ScheduledGeneration, int] = field(default_factory=dict)
    virtual_time: int = 0
    most_ongoing: int = 0
    most_policies: int = 0
    """Named ones that had generations there at a time."""
    max_loras: float = math.inf
    passed_over: "list[tuple[ScheduledGeneration, int]]" = field(default_factory=list)
    """Generations, with their lengths, whose adapter has no place in the engine's batch."""
    ended: int = 0

    def __post_init__(self) -> None:
        self.engine = TimedGenerations(self.timing)

    def load(self) -> ReplicaLoad:
        return ReplicaLoad(
            len(self.ingress_of), ingresses=len(set(self.ingress_of.values())), virtual_time=self.virtual_time
        )

    @property
    def policies(self) -> set[str]:
        """The named ones that have generations there."""
        return {each.request.policy for each in self.ingress_of if each.request.policy is not None}

    def submit(self, scheduled: ScheduledGeneration, ingress: int, length: int, now: float) -> None:
        self.ingress_of[scheduled] = ingress
        self.passed_over.append((scheduled, length))
        self.take(now)
        self.most_ongoing = max(self.most_ongoing, len(self.ingress_of))
        self.most_policies = max(self.most_policies, len(self.policies))

    def take(self, now: float) -> None:
        """As vLLM does: passes over those whose adapter has no place beside those of the ones that it has taken."""
        left = dict(self.passed_over)
        held = {each.request.policy for each in self.ingress_of if each not in left} - {None}
        for scheduled, length in self.passed_over:
            policy = scheduled.request.policy
            if policy is None or policy in held or len(held) < self.max_loras:
                held |= {policy} - {None}
                del left[scheduled]
                self.engine.submit(scheduled, length, now, scheduled.virtual_time)
        self.passed_over = list(left.items())


class Fleet:
    """Replicas of one speed behind ingress replicas with a scheduler each."""

    def __init__(
        self,
        replicas: int,
        timing: Timing,
        window_factor: float | None = 2.0,
        ingresses: int = 1,
        max_loras: float = math.inf,
        kv_tokens: float = math.inf,
        keeps_places: bool = True,
    ) -> None:
        self.now = 0.0
        self._timing = timing
        self._capacity = EngineCapacity(timing.max_num_seqs, kv_tokens, max_loras)
        self.schedulers = [GenerationScheduler(window_factor, random.Random(n), keeps_places) for n in range(ingresses)]
        self.replicas: dict[str, Replica] = {}
        self.draining: dict[str, Replica] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._draw = random.Random(7)
        self._batches: dict[str, Batch] = {}
        self._lengths: dict[ScheduledGeneration, int] = {}
        self.began: dict[str, float] = {}
        self.ended: dict[str, float] = {}
        """When the last rollout of each request ended."""
        self.turns_ended: Counter[str] = Counter()
        self.turns_by_replica: list[tuple[float, str]] = []
        self._left: Counter[str] = Counter()
        for scheduler in self.schedulers:
            scheduler.set_capacity(self._capacity)
        self.scale(replicas)

    def scale(self, replicas: int) -> None:
        for number in range(len(self.replicas), replicas):
            self.replicas[f"r{number}"] = Replica(f"r{number}", self._timing, max_loras=self._capacity.adapters)
        self.pass_on(lambda scheduler: scheduler.set_replicas(list(self.replicas)))

    def replace(self, lost: str, new: str, dies: bool) -> None:
        """Lists a new replica in place of one that takes no calls any more, and has died or runs its own to the end."""
        self.replicas[new] = Replica(new, self._timing, max_loras=self._capacity.adapters)
        gone = self.replicas.pop(lost)
        self.pass_on(lambda scheduler: scheduler.set_replicas(list(self.replicas)))
        if not dies:
            self.draining[lost] = gone
            return
        for scheduled, ingress in gone.ingress_of.items():
            length = self._lengths.pop(scheduled)
            self._send(ingress, self.schedulers[ingress].end(scheduled, replica_failed=True))
            self._submit(scheduled.request, ingress, length)

    def pass_on(self, change: "Callable[[GenerationScheduler], object]") -> None:
        for ingress, scheduler in enumerate(self.schedulers):
            self._send(ingress, change(scheduler))

    def at(self, time: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._numbers), action))

    def post(self, batch: Batch) -> None:
        self._batches[batch.name] = batch
        self.began[batch.name] = self.now
        self._left[batch.name] = batch.rollouts
        for number in range(batch.rollouts):
            self._play_turn(batch, number, 0, batch.prompt_tokens)

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Until nothing happens any more, or `until`."""
        while not until():
            engines = {**self.replicas, **self.draining}
            ends = [(end, name) for name, one in engines.items() if (end := one.engine.next_end) is not None]
            next_end = min(ends, default=None)
            if self._events and (next_end is None or self._events[0][0] <= next_end[0]):
                self.now, _, action = heapq.heappop(self._events)
                action()
            elif next_end is not None:
                self.now = next_end[0]
                self._end(engines[next_end[1]])
            else:
                return

    def seconds(self, name: str) -> float:
        return self.ended[name] - self.began[name]

    def _play_turn(self, batch: Batch, number: int, turn: int, prompt_tokens: int) -> None:
        request = GenerationRequest(
            f"{batch.name}-{number}-{turn}",
            range(prompt_tokens),
            batch.tokens,
            (),
            SamplingOptions(),
            rollout_id=f"{batch.name}-{number}",
            group=f"{batch.name}-{number}",
            turn=turn,
            share=RequestShare(batch.name, batch.weight, batch.key, batch.key_weight),
            policy=batch.policy,
        )
        self._submit(request, batch.ingress, self._draw.randint(batch.tokens // 2, batch.tokens))

    def _submit(self, request: GenerationRequest, ingress: int, length: int) -> None:
        scheduled = self.schedulers[ingress].submit(request)
        self._lengths[scheduled] = length
        if scheduled.has_started:
            self._send(ingress, [scheduled])

    def _send(self, ingress: int, started: "list[ScheduledGeneration] | tuple[()] | object") -> None:
        assert isinstance(started, list | tuple)
        for scheduled in started:
            self.replicas[scheduled.replica].submit(scheduled, ingress, self._lengths[scheduled], self.now)

    def _end(self, replica: Replica) -> None:
        for scheduled in replica.engine.pop_finished(self.now):
            ingress = replica.ingress_of.pop(scheduled)
            replica.take(self.now)
            replica.virtual_time = max(replica.virtual_time, scheduled.virtual_time)
            scheduler = self.schedulers[ingress]
            self._send(ingress, scheduler.observe(replica.name, replica.load(), ended=1))
            length = self._lengths.pop(scheduled)
            self._send(ingress, scheduler.end(scheduled, length))
            self._after_turn(scheduled, replica.name, length)

    def _after_turn(self, scheduled: ScheduledGeneration, replica: str, length: int) -> None:
        request = scheduled.request
        name, number, turn = request.generation_id.rsplit("-", 2)
        batch = self._batches[name]
        self.turns_ended[name] += 1
        self.turns_by_replica.append((self.now, replica))
        if int(turn) + 1 < batch.turns:
            tokens = len(request.prompt_token_ids) + length
            pause = self._draw.expovariate(1 / batch.tool_s) if batch.tool_s else 0.0
            later = self.now + ROUND_TRIP_S + pause
            self.at(later, lambda: self._play_turn(batch, int(number), int(turn) + 1, tokens))
            return
        self.schedulers[batch.ingress].release(request.rollout_id)
        self._left[name] -= 1
        if not self._left[name]:
            self.ended[name] = self.now
