"""Generations that fill gaps: those of priority `batch` run in places of the engines that no other one needs.

A state machine: no I/O, no clock, no Ray. Such generations wait in a queue of their own, and share the gaps by the
weights of their requests. A replica has a gap while its engine could run one more generation at once and has the KV
cache for it, up to `part` of both while it runs others: a larger batch decodes slower, and those that run there are the
stragglers that others wait for. A replica without others is filled whole. When others come, as many are parked as are
too many then: interrupted with the tokens that they have, to go on in the next gap.

Guarantees: none starts in a gap while a generation that fills none waits; none takes room of the windows of others; one
that was submitted starts exactly once, unless it is cancelled before; each is parked at most once; where nothing else
runs, all of them run; where others leave no gap, one runs at a time in turn with them, started by `start_starved`.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from deployments.protocols.generation import GenerationRequest, ScoringRequest
from deployments.protocols.model_server import ServedRequest
from service.scheduling.replica_queues import ReplicaQueues, ScheduledGeneration
from service.scheduling.replica_set import ReplicaSet
from service.scheduling.replica_window import ReplicaWindow
from service.scheduling.scheduled_requests import ScheduledRequests

GAP_PART = 0.5
"""Default part, as that of `scheduling.gap_part`."""
BEHIND_OTHERS = 2**52
"""Added to the virtual times of those that fill gaps: where generations wait in an engine, they come last."""


@dataclass(slots=True)
class Filling:
    """The generations that fill gaps of one replica."""

    running: dict[ScheduledGeneration, None] = field(default_factory=dict)
    """In the order of their starts."""
    leaving: int = 0
    """Sequences of those that are parked and have not ended yet."""
    leaving_tokens: float = 0.0


class GapFilling:
    """The generations of one ingress replica that fill gaps."""

    def __init__(
        self, replicas: ReplicaSet, others: ReplicaQueues, part: float = GAP_PART, choose: random.Random | None = None
    ) -> None:
        """Begins without generations.

        Args:
            others: the queue of those that fill no gaps.
            part: the part of an engine's places and KV cache that may be filled beside others, from 0 to 1.
            choose: breaks ties between replicas.
        """
        self.requests = ScheduledRequests(replicas, choose)
        self.queue = self.requests.queue
        self._replicas = replicas
        self._others = others
        self._part = part
        self._filling: dict[str, Filling] = {}
        """By replica; only those with running generations."""
        self._were_kept_waiting = False
        """Whether a gap was not filled because others waited."""
        self._has_run = False
        """Whether any has run since the last call of `start_starved`."""

    def submit(self, request: GenerationRequest) -> ScheduledGeneration:
        """Starts the generation if there is a gap for it and no other one waits, or lets it wait."""
        generation = self.requests.generation_of(request)
        is_alone = not self.queue
        self._wait(generation)
        if self._others:
            self._were_kept_waiting = True
        elif is_alone:
            windows = self._replicas.windows
            for replica in sorted(windows, key=lambda name: (name != generation.replica, windows[name].ongoing)):
                if self.fill(replica, windows[replica]):
                    break
        return generation

    def fill(self, replica: str, window: ReplicaWindow) -> list[ScheduledGeneration]:
        """Starts generations that fill the gaps of this replica; of all replicas if others no longer wait."""
        if not self.queue:
            return []
        if self._others:
            self._were_kept_waiting = True
            return []
        if self._were_kept_waiting:
            self._were_kept_waiting = False
            return self.fill_all()
        started: list[ScheduledGeneration] = []
        while (generation := self._next(replica, window)) is not None:
            self._start(generation, window)
            started.append(generation)
        return started

    def fill_all(self) -> list[ScheduledGeneration]:
        """Starts generations that fill the gaps of all replicas."""
        return [each for replica, window in self._replicas.windows.items() for each in self.fill(replica, window)]

    def end(self, generation: ScheduledGeneration, window: ReplicaWindow) -> None:
        """Takes out a generation that has ended."""
        tokens = generation.kv_tokens + generation.shared_tokens
        window.leave_gap(tokens, generation.request.policy, generation.sequences)
        filling = self._filling[generation.replica]
        del filling.running[generation]
        if generation.is_parked:
            filling.leaving -= generation.sequences
            filling.leaving_tokens -= tokens
        if not filling.running:
            del self._filling[generation.replica]

    def generations_to_park(self) -> Sequence[ScheduledGeneration]:
        """Those whose places others need now, the youngest first, each once; the caller interrupts them.

        A call of a model server's API, which cannot go on later, and a score, which is short, run to their ends.
        """
        parked: list[ScheduledGeneration] = []
        for replica, filling in self._filling.items():
            window = self._replicas.windows.get(replica)
            if window is None:
                continue
            are_all_needed = bool(self._others.size_at(replica))
            if not (are_all_needed or window.is_overfilled(self._part, filling.leaving, filling.leaving_tokens)):
                continue
            for generation in reversed(filling.running):
                if not can_be_parked(generation):
                    continue
                generation.is_parked = True
                filling.leaving += generation.sequences
                filling.leaving_tokens += generation.kv_tokens + generation.shared_tokens
                parked.append(generation)
                if not (are_all_needed or window.is_overfilled(self._part, filling.leaving, filling.leaving_tokens)):
                    break
        return parked

    def start_starved(self) -> Sequence[ScheduledGeneration]:
        """Starts one that waits, in turn with others and never parked, if none has run since the last call."""
        has_run, self._has_run = self._has_run, bool(self._filling)
        if has_run or self._filling:
            return ()
        windows = self._replicas.windows
        for replica in sorted(windows, key=self.queue.size_at, reverse=True):
            generation = self.queue.next_filling(replica, windows[replica].turns)
            if generation is not None:
                self._start(generation, windows[replica])
                generation.fills_gap, generation.virtual_time = False, int(self._others.virtual_time)
                return (generation,)
        return ()

    def try_on(self, replica: str) -> ScheduledGeneration | None:
        """Starts the oldest that may try a suspect replica; returns it."""
        generation = next((waiting for waiting in self.queue if waiting.may_try(replica)), None)
        if generation is not None:
            self.requests.move(generation, replica)
            self._start(generation, self._replicas.windows[replica])
        return generation

    def reassign(self) -> None:
        """Lets those that wait for a replica which is gone, suspect or of another version wait for others."""
        for generation in list(self.queue):
            if generation.replica not in self._candidates(generation.request):
                self.queue.remove(generation)
                self._wait(generation)

    def _wait(self, generation: ScheduledGeneration) -> None:
        request = generation.request
        replica = self.requests.assign(request, self._candidates(request)).replica
        assert replica is not None
        self.requests.wait(generation, replica)

    def _candidates(self, request: GenerationRequest) -> Sequence[str]:
        admitting = self._replicas.admitting(request)
        windows = self._replicas.windows
        return [replica for replica in admitting if not windows[replica].is_suspect] or list(admitting)

    def _next(self, replica: str, window: ReplicaWindow) -> ScheduledGeneration | None:
        """The generation that is next on the replica, or one that waits for another, if there is a gap for it."""
        generation = self.queue.next_filling(replica, window.turns)
        if generation is not None:
            has_gap = window.has_gap(self._part, generation.kv_tokens + generation.shared_tokens, generation.sequences)
            return generation if has_gap else None
        longest = None if self.queue.size_at(replica) else self.queue.longest_lane()
        moved = None if longest is None else self.queue.last_of(longest)
        if moved is None:
            return None
        # Nothing of it is cached here.
        tokens = moved.kv_tokens + moved.shared_tokens
        may_start = self._replicas.admits(replica, moved.request) and window.turns.may_start(moved.request.policy)
        if not (may_start and window.has_gap(self._part, tokens, moved.sequences)):
            return None
        self.requests.move(moved, replica)
        return moved

    def _start(self, generation: ScheduledGeneration, window: ReplicaWindow) -> None:
        virtual_time = self.queue.start(generation, generation.cost)
        self.queue.advance(virtual_time)
        tokens = generation.kv_tokens + generation.shared_tokens
        window.fill_gap(tokens, generation.request.policy, generation.sequences)
        generation.window = window
        generation.fills_gap, generation.virtual_time = True, BEHIND_OTHERS + int(virtual_time)
        self._filling.setdefault(generation.replica, Filling()).running[generation] = None
        self._has_run = True


def can_be_parked(generation: ScheduledGeneration) -> bool:
    cannot = isinstance(generation.request, ServedRequest | ScoringRequest)
    return generation.fills_gap and not generation.is_parked and not cannot
