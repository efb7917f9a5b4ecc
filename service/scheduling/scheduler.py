"""Which generation starts next, and on which replica. A state machine: no I/O, no clock, no Ray.

Generations wait here and not in the engines: a replica gets those that fill its window (`window.py`), in turn from all
requests (`fair_queue.py`), and a rollout goes to the replica that has its prefix cached (`affinity.py`) unless the wait
there costs more than computing the prefix again elsewhere.

Rollouts of several turns are admitted to a KV cache as programs: one that is idle, because its tool runs, keeps its
prefix there by a lease. Where a generation that starts leaves no room for all leases, the rollout that is idle longest
is parked; when it comes back, it waits until it fits beside the leases of others. A request whose rollouts have played
no second turn waits for no lease.

Guarantees: each generation that was submitted starts exactly once, unless it is cancelled before; no replica has more
generations than its window holds, but for the choices of one call beyond half of it; no generation waits for one
replica while another has room for it and moving costs less than waiting.
"""

import math
import random
from collections import Counter
from collections.abc import Collection, Sequence

from deployments.protocols.generation import GenerationRequest, ScoringRequest
from deployments.protocols.replicas import ReplicaLoad
from deployments.protocols.weight_versions import RollingActivation
from service.scheduling.affinity import Assignment, ReplicaAffinity
from service.scheduling.replicas import (
    PREFILL_COST,
    KnownRequests,
    ReplicaQueues,
    ReplicaSet,
    ScheduledGeneration,
)
from service.scheduling.window import EngineCapacity, ReplicaWindow

_HIGHEST_RANK = 31
"""Later turns have this rank too, because the queue searches the ranks of a request one by one."""
_TURN_BATCHES = 2
"""For about so many batches the policies that a replica runs may go on while another one waits. At the end of a turn
the engine's batch runs empty, for as long as its longest generation takes."""
_PLACE_TURNS = 4
"""So many such turns a request may be behind for want of places, each with as many generations as run."""
Started = Sequence[ScheduledGeneration]
"""Generations that had waited and are to be sent now."""


class GenerationScheduler:
    """The generations of one ingress replica. The caller sends each one when it starts, and reports its end."""

    def __init__(
        self, window_factor: float | None, choose: random.Random | None = None, keeps_places: bool = True
    ) -> None:
        """Begins without replicas.

        Args:
            window_factor: the window of a replica in multiples of its engine's batch; `None` lets each generation start
                at once, on the replica of its rollout.
            choose: breaks ties between replicas.
            keeps_places: whether idle rollouts keep leases.
        """
        self._keeps_places = keeps_places and window_factor is not None
        self._window_factor = window_factor
        self._replicas = ReplicaSet(window_factor)
        self._queue = ReplicaQueues()
        self._affinity = ReplicaAffinity(choose)
        self._requests = KnownRequests(self._queue)
        self._free = self._replicas.windows.copy()
        """Replicas that can run a generation at once and have none waiting."""
        self._to_try: set[str] = set()
        """Suspect replicas without a generation, which the next one tries."""

    @property
    def waiting(self) -> int:
        """How many generations wait."""
        return len(self._queue)

    @property
    def waiting_by_weight(self) -> Counter[float]:
        """How many generations wait, by the weight that their request has for its priority."""
        return Counter(generation.request.share.weight for generation in self._queue)

    def waiting_for(self, replica: str) -> int:
        """How many of them need this replica: each choice of a call counts."""
        return self._queue.size_at(replica)

    def programs_at(self, replica: str) -> tuple[int, int]:
        """How many idle rollouts keep a place in its KV cache, and how many are parked and wait for one."""
        return self._affinity.idle_at(replica), self._queue.size_at(replica, needs_place=True)

    def submit(self, request: GenerationRequest) -> ScheduledGeneration:
        """Starts the generation, or lets it wait."""
        of_request = self._requests.of(request)
        generation = ScheduledGeneration.of(request, of_request, self._assign(request))
        self._affinity.end_idleness(generation.assignment)
        if generation.is_further_turn:
            # Those of the request that wait for their first turn need a place from now on.
            for other in self._requests.note_turns(of_request) if self._keeps_places else ():
                self._queue.remove(other)
                other.estimate()
                self._wait(other, other.replica)
        tried = next((replica for replica in self._to_try if generation.may_try(replica)), None)
        if tried is not None:
            self._try(generation, tried)
            return generation
        if self._replicas.load_of_others:
            self._leave_suspect(generation)
        self._place(generation)
        return generation

    def let_try(self, replica: str) -> Started:
        """Lets one generation try the replica, if it is suspect and has none: the oldest that waits, else the next."""
        window = self._replicas.windows.get(replica)
        if window is None or not window.is_suspect or window.generations:
            return ()
        generation = next((waiting for waiting in self._queue if waiting.may_try(replica)), None)
        if generation is None:
            self._to_try.add(replica)
            return ()
        self._queue.remove(generation)
        self._try(generation, replica)
        return (generation,)

    def end(
        self, generation: ScheduledGeneration, new_tokens: int | None = None, *, replica_failed: bool = False
    ) -> Started:
        """Records that a generation has ended which had started.

        Args:
            new_tokens: its length; `None` if it has no result.
            replica_failed: the rollout's next generation goes to another replica, if there is one. The caller calls
                `let_try` in some seconds.
        """
        window, replica = generation.window, generation.replica
        assert window is not None
        window.remove(generation.kv_tokens, generation.request.policy, generation.sequences)
        generation.window = None
        if new_tokens is not None:
            self._queue.advance(generation.virtual_time)
            self._learn(generation, new_tokens)
            if not replica_failed:
                generation.assignment.avoided = None
                window.note_success()
        if replica_failed:
            self._affinity.mark_failed(generation.request.rollout_id)
            window.note_failure()
        if self._replicas.windows.get(replica) is not window:
            return ()
        if new_tokens is not None:
            self._keep_place(generation)
        if replica_failed or replica in self._replicas.load_of_others:
            self._replicas.note_load(replica, window)
        moved = self._place_elsewhere(replica) if window.is_suspect else ()
        # One that was cancelled has not told whether the replica works.
        tries = () if replica_failed else self.let_try(replica)
        return [*moved, *tries, *self._fill(replica, window)]

    def leave_replica(self, rollout_id: str) -> None:
        """Lets the rollout's next generation go to another replica, if there is one. Ignores unknown ids."""
        self._affinity.mark_failed(rollout_id)

    def cancel(self, generation: ScheduledGeneration) -> None:
        """Forgets a generation that waits."""
        self._queue.remove(generation)
        self._affinity.lease(generation.assignment)
        self._note_free(generation.replica, self._replicas.windows[generation.replica])

    def release(self, rollout_id: str) -> None:
        """Forgets a rollout that has no further generation. Ignores unknown ids."""
        self._affinity.release(rollout_id)
        self._requests.release(rollout_id)

    def observe(self, replica: str, load: ReplicaLoad, ended: int) -> Started:
        """Records the load that the replica has reported.

        Args:
            ended: generations of this ingress that have ended and are no longer in `load`, but whose `end` is to come.
        """
        window = self._replicas.windows.get(replica)
        if window is None:
            return ()
        self._queue.advance(load.virtual_time)
        if window.observe(load, ended):
            self._replicas.note_load(replica, window)
        return self._fill(replica, window) if self._queue else ()

    def set_capacity(self, capacity: EngineCapacity) -> Started:
        """Sets the number of sequences and tokens that every engine can run at once."""
        if capacity == self._replicas.capacity or self._window_factor is None:
            return ()
        self._replicas.resize(capacity)
        return self.fill_all()

    def set_rolling(self, rolling: RollingActivation | None) -> Started:
        """Records which replicas have which version, while they change one by one; `None`: all have the same.

        The leases of those that have changed end: their caches hold nothing of use. Called also after updates in which
        all change at once. Generations that wait for one whose version they do not accept any more wait for others.
        """
        replicas = self._replicas
        changed = frozenset(replicas.windows) if rolling is None else rolling.replicas
        if (before := replicas.rolling) is not None and (rolling is None or rolling.version == before.version):
            changed = changed - before.replicas
        self._affinity.end_leases(changed)
        replicas.rolling = rolling
        moved = self._place_again([each for each in self._queue if not replicas.admits(each.replica, each.request)])
        return moved + list(self.fill_all())

    def let_others_pass(self) -> Started:
        """Called once in a while: parks the rollouts that are idle since the call before, where others need a place."""
        self._affinity.note_time()
        started: list[ScheduledGeneration] = []
        for replica, window in self._replicas.windows.items():
            while self._lacks_place(replica) and self._affinity.park(replica, idle_times=2):
                started += self._fill(replica, window)
        return started

    def set_replicas(self, replicas: Collection[str]) -> Started:
        """Sets the replicas that take calls. Generations that wait for one that is gone wait for others."""
        gone = self._replicas.set_listed(replicas)
        self._affinity.end_leases(gone)
        for replica in gone:
            self._free.pop(replica, None)
            self._to_try.discard(replica)
        for replica, window in self._replicas.windows.items():
            self._note_free(replica, window)
        moved = [generation for replica in gone for generation in self._place_elsewhere(replica)]
        tries = [tried for replica in self._replicas.windows for tried in self.let_try(replica)]
        return moved + tries + list(self.fill_all())

    def _place_elsewhere(self, replica: str) -> Started:
        """Moves all that waits for a replica that is gone, or is suspect while another is not."""
        if replica in self._replicas.windows and self._replicas.are_all_suspect:
            return ()
        waiting = self._queue.items_at(replica)
        for generation in waiting:
            self._affinity.mark_failed(generation.request.rollout_id)
        return self._place_again(waiting)

    def _place_again(self, waiting: Sequence[ScheduledGeneration]) -> list[ScheduledGeneration]:
        """Assigns generations that wait to other replicas. Returns those that start."""
        for generation in waiting:
            self._queue.remove(generation)
            self._assign(generation.request)
            self._place(generation)
        return [generation for generation in waiting if generation.has_started]

    def _leave_suspect(self, generation: ScheduledGeneration) -> None:
        replica = generation.assignment.replica
        if replica is not None and self._replicas.windows[replica].is_suspect:
            self._affinity.mark_failed(generation.request.rollout_id)
            self._assign(generation.request)

    def _place(self, generation: ScheduledGeneration) -> None:
        """Starts the generation, or lets it wait, on the replica of its rollout or on one that it moves to."""
        replica = generation.assignment.replica
        assert replica is not None
        window, policy = self._replicas.windows[replica], generation.request.policy
        generation.estimate()
        can_start = window.has_free_sequence and window.may_start(policy) and self._has_place(generation, replica)
        if self._free and not can_start:
            able = (name for name in self._free if self._may_move(generation, name))
            other = min(able, key=lambda name: self._free[name].ongoing, default=None)
            if other is not None and self._pays(generation, replica, other):
                self._move(generation, other)
                replica, window = other, self._replicas.windows[other]
        self._wait(generation, replica)
        has_room = window.has_room(generation.kv_tokens, generation.sequences)
        if has_room and self._next_at(replica, window) is generation:
            self._start(generation, window)

    def _try(self, generation: ScheduledGeneration, replica: str) -> None:
        """Starts a generation that does not wait on a suspect replica."""
        self._move(generation, replica)
        self._wait(generation, replica)
        self._start(generation, self._replicas.windows[replica])

    def _start(self, generation: ScheduledGeneration, window: ReplicaWindow) -> None:
        """Starts a generation that waits for this replica."""
        virtual_time = self._queue.start(generation, generation.cost)
        generation.has_place = generation.needs_place or generation.assignment.leased_tokens > 0
        self._affinity.end_lease(generation.assignment)
        window.add(generation.kv_tokens, generation.request.policy, generation.sequences)
        generation.window = window
        if self._window_factor is not None:
            generation.virtual_time = int(virtual_time)
        replica = generation.replica
        while window.tokens_beside(self._affinity.leased[replica]) < 0 and self._affinity.park(replica):
            pass
        self._to_try.discard(replica)
        self._note_free(replica, window)

    def _next_at(self, replica: str, window: ReplicaWindow) -> ScheduledGeneration | None:
        batch, tokens = self._replicas.largest_batch, _TURN_BATCHES * self._requests.mean_tokens
        behind = max(min(window.generations, batch), 1) * _PLACE_TURNS * tokens
        return self._queue.next_at(replica, window, self._affinity.leased[replica], batch * tokens, behind)

    def _lacks_place(self, replica: str) -> bool:
        return self._queue.lacks_place(replica, self._replicas.windows[replica], self._affinity.leased[replica])

    def _has_place(self, generation: ScheduledGeneration, replica: str) -> bool:
        return generation.has_place_at(replica, self._replicas.windows[replica], self._affinity.leased[replica])

    def fill_all(self) -> Started:
        """Starts what has room by now: not every event that makes room starts something. Called once in a while."""
        return [started for name, window in self._replicas.windows.items() for started in self._fill(name, window)]

    def _fill(self, replica: str, window: ReplicaWindow) -> Started:
        """Starts generations that wait for this replica, then some that wait for others, while its window has room."""
        started: list[ScheduledGeneration] = []
        while self._queue:
            generation = self._next_at(replica, window)
            if (
                generation is None
                and not self._queue.size_at(replica, needs_place=False)
                and (generation := self._worth_moving_to(replica)) is not None
            ):
                self._queue.remove(generation)
                self._move(generation, replica)
                self._wait(generation, replica)
            if generation is None or not window.has_room(generation.kv_tokens, generation.sequences):
                break
            self._start(generation, window)
            started.append(generation)
        self._note_free(replica, window)
        return started

    def _worth_moving_to(self, replica: str) -> ScheduledGeneration | None:
        """A generation that waits for another replica, if `replica` has room for it and moving it pays."""
        lasts = ((lane, self._queue.last_of(lane)) for lane in self._queue.longest_lanes() if lane[0] != replica)
        pays = (last for lane, last in lasts if last is not None and self._is_worth_moving(last, lane[0], replica))
        return next(pays, None)

    def _is_worth_moving(self, generation: ScheduledGeneration, waits_at: str, replica: str) -> bool:
        window = self._replicas.windows[replica]
        tokens = generation.kv_tokens + generation.assignment.shared_tokens
        can_start = window.has_room(tokens, generation.sequences) and self._may_move(generation, replica)
        return can_start and self._pays(generation, waits_at, replica)

    def _may_move(self, generation: ScheduledGeneration, replica: str) -> bool:
        may_start = self._replicas.windows[replica].may_start(generation.request.policy)
        return may_start and self._replicas.admits(replica, generation.request) and self._has_place(generation, replica)

    def _move(self, generation: ScheduledGeneration, replica: str) -> None:
        self._affinity.move(generation.request.rollout_id, replica)
        generation.estimate()

    def _wait(self, generation: ScheduledGeneration, replica: str) -> None:
        generation.replica = replica
        self._queue.wait(generation, replica, min(generation.request.turn, _HIGHEST_RANK))
        self._note_free(replica, self._replicas.windows[replica])

    def _pays(self, generation: ScheduledGeneration, replica: str, other: str) -> bool:
        """Whether the wait that `other` saves is longer than computing there what `replica` has cached."""
        policy = generation.request.policy
        if not self._has_place(generation, replica):
            return True
        saved = self._ahead(replica, policy) - self._ahead(other, policy)
        wait_tokens = saved * self._requests.mean_tokens / self._replicas.capacity.sequences
        return wait_tokens > PREFILL_COST * generation.assignment.cached_tokens

    def _ahead(self, replica: str, policy: str | None) -> float:
        """Generations that must end before one of this policy that comes last there can run."""
        window = self._replicas.windows[replica]
        ongoing = window.ongoing + self._queue.size_at(replica, needs_place=False)
        is_closed = window.is_suspect or not window.may_start(policy)
        return math.inf if is_closed else max(ongoing + 1 - self._replicas.capacity.sequences, 0)

    def _note_free(self, replica: str, window: ReplicaWindow) -> None:
        if window.has_free_sequence and not self._queue.size_at(replica, needs_place=False):
            self._free[replica] = window
        else:
            self._free.pop(replica, None)

    def _assign(self, request: GenerationRequest) -> Assignment:
        """The assignment of the generation's rollout to a replica that admits the request."""
        return self._affinity.assignment_of(
            request.rollout_id,
            request.group,
            self._replicas.admitting(request),
            len(request.prompt_token_ids),
            self._replicas.load_of_others,
        )

    def _learn(self, generation: ScheduledGeneration, new_tokens: int) -> None:
        """Records the length of a generation that has ended."""
        if isinstance(generation.request, ScoringRequest):
            # It generates nothing, and tells nothing about the length of generations.
            return
        assignment, length = generation.assignment, new_tokens / generation.sequences
        self._requests.learn(generation.of_request, length)
        assignment.computed_tokens = generation.prompt_tokens + round(length)
        if assignment.replica == generation.replica:
            assignment.cached_tokens = assignment.computed_tokens

    def _keep_place(self, generation: ScheduledGeneration) -> None:
        """Leases the place of a generation that has ended, unless it had none and others wait for one."""
        assignment, replica = generation.assignment, generation.replica
        if not self._keeps_places or assignment.replica != replica:
            return
        if generation.has_place or not self._lacks_place(replica):
            self._affinity.lease(assignment, assignment.cached_tokens - assignment.shared_tokens)
