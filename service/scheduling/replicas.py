"""The generator replicas as one ingress replica knows them. State machines: no I/O, no clock, no Ray.

`ReplicaSet` has their windows, and which versions they have. `ReplicaQueues` has the generations that wait for each,
and which of them is next there: one of the flow with the lowest virtual time (`fair_queue.py`) among those whose policy
may start there. A flow whose policy may not start, because the engine holds no more adapters, falls behind those that
go on; when it is behind by more than a turn, they wait until the generations of one policy have ended.

`ScheduledGeneration` is one that waits or has started, `RequestState` the request that it is of, of `KnownRequests`.
"""

from collections.abc import Collection
from dataclasses import dataclass
from operator import itemgetter
from weakref import WeakValueDictionary

from deployments.protocols.generation import GenerationRequest, RequestShare
from deployments.protocols.model_server import ServedRequest
from deployments.protocols.weight_versions import RollingActivation
from service.scheduling.affinity import Assignment
from service.scheduling.fair_queue import FairQueue, Flow
from service.scheduling.window import EngineCapacity, ReplicaWindow

_USUAL_BATCH = 256
PREFILL_COST = 0.1
"""Cost of computing a prompt token, in generated tokens: engines compute about ten times as many prompt tokens a
second."""
FIRST_EXPECTED_TOKENS = 1024.0
"""Expected length until the first generations have ended. Too long on purpose: an engine that gets too many
generations runs out of KV cache."""
LEARNING_RATE = 1 / 16
"""Weight of the latest generation in the moving mean of lengths."""
UNKNOWN_REPLICA = ""
"""Stands for whichever replica Serve chooses, while none is known."""
SUSPECT_LOAD = 1_000_000
"""Load that is assumed of a suspect replica, whose last calls failed: new rollouts go there only if all replicas are
suspect, or to try it."""


@dataclass(slots=True, eq=False)
class RequestState:
    """The scheduler's record of one request."""

    id: str
    flow: "RequestFlow"
    """Its flow in the fair queue: its own, or that of its caller's key."""
    part: "RequestFlow | None"
    """Its part of the flow, if the flow is a key's."""
    expected_tokens: float
    """Mean length of its generations."""
    rollouts: int = 0
    """The number of rollouts that are not released."""
    plays_turns: bool = False
    """Whether one of its rollouts has come back for a further turn."""


@dataclass(slots=True, eq=False)
class ScheduledGeneration:
    """A generation that waits, or that has started on `replica`."""

    request: GenerationRequest
    of_request: RequestState
    assignment: Assignment
    cost: float = 0.0
    """The charge to its request, in generated tokens."""
    kv_tokens: float = 0.0
    """Tokens of the KV cache that it needs at its end, without those that another rollout of its group holds there."""
    sequences: int = 1
    """Texts that the engine generates for it at once."""
    replica: str = UNKNOWN_REPLICA
    """The replica where it waits or runs."""
    window: ReplicaWindow | None = None
    """The window in which it counts; `None` until it starts and after it has ended."""
    prompt_tokens: int = 0
    """Length of its prompt; of a call estimated, until it has ended."""
    virtual_time: int = 0
    """The virtual time that the engine gets."""
    needs_place: bool = False
    """Whether it starts only where the KV cache has room beside the leases of others: it is a turn of several, and has
    no lease."""
    has_place: bool = False
    """Whether it has started from a lease, or as one that needs a place: a lease follows it."""

    @classmethod
    def of(cls, request: GenerationRequest, of_request: RequestState, assignment: Assignment) -> "ScheduledGeneration":
        sequences = request.choices if isinstance(request, ServedRequest) else 1
        prompt_tokens = len(request.prompt_token_ids)
        return cls(request, of_request, assignment, sequences=sequences, prompt_tokens=prompt_tokens)

    @property
    def has_started(self) -> bool:
        return self.window is not None

    @property
    def is_further_turn(self) -> bool:
        """Whether its rollout has come back after a turn; not to go on with one, nor by a call without a session."""
        is_later = self.request.session_id if isinstance(self.request, ServedRequest) else self.request.turn
        return bool(self.assignment.computed_tokens and is_later)

    def has_place_at(self, replica: str, window: ReplicaWindow, leased: float) -> bool:
        """Whether it may start beside the leases of others, on its own replica or on one that it would move to."""
        is_there = self.assignment.replica == replica
        if not self.needs_place and (is_there or not self.of_request.plays_turns):
            return True
        if is_there:
            return window.has_place(self.kv_tokens, leased - self.assignment.leased_tokens, self.sequences)
        return window.has_place(self.kv_tokens + self.assignment.shared_tokens, leased, self.sequences)

    def may_try(self, replica: str) -> bool:
        """Whether it may try a suspect replica: its rollout was not lost there last, and it names no other one."""
        return self.assignment.avoided != replica and self.request.replica in ("", replica)

    def recomputed(self, had: int, cached: int) -> int:
        """How many tokens of its prompt the engine has computed although an earlier turn had, in whole blocks.

        Called while it counts in a window.

        Args:
            had: tokens at the beginning of its prompt that were part of its rollout before.
            cached: those that the engine found in its prefix cache.
        """
        assert self.window is not None
        block, known = self.window.block_tokens, min(self.assignment.computed_tokens - 1, had)
        return max(known // block * block - cached, 0)

    def estimate(self) -> None:
        """Sets its cost and its tokens in the KV cache, on the replica to which it is assigned now."""
        self.needs_place = self.of_request.plays_turns and not self.assignment.leased_tokens
        new_tokens = self.sequences * min(self.of_request.expected_tokens, self.request.max_new_tokens)
        self.cost = new_tokens + PREFILL_COST * max(self.prompt_tokens - self.assignment.cached_tokens, 0)
        self.kv_tokens = new_tokens + self.prompt_tokens - self.assignment.shared_tokens


ReplicaLane = tuple[str, str | None, bool]
"""A replica, the policy that its generations name, and whether they need a place there."""
RequestFlow = Flow[ScheduledGeneration, ReplicaLane]


def _is_behind(of_request: RequestState, ahead: RequestState, turn: float) -> bool:
    """Whether a request, or its key, is behind another one by more than `turn`, which is meant for the weight 1."""
    mine, other = of_request.flow, ahead.flow
    if mine is other and of_request.part is not None and ahead.part is not None:
        mine, other = of_request.part, ahead.part
    return other.virtual_time - mine.virtual_time > turn / mine.weight


class ReplicaQueues(FairQueue[ScheduledGeneration, ReplicaLane]):
    """Two lanes for each replica and policy."""

    def __init__(self) -> None:
        super().__init__()
        self._lanes_at: dict[str, dict[ReplicaLane, int]] = {}
        """By replica, how many sequences wait in each of its lanes."""

    def wait(self, generation: ScheduledGeneration, replica: str, rank: int) -> None:
        lane = replica, generation.request.policy, generation.needs_place
        of_request = generation.of_request
        # Those that need a place come in the order in which they began to wait.
        rank = min(rank, 1) if generation.needs_place else rank
        self.add(generation, lane, of_request.flow, rank, of_request.part)
        lanes = self._lanes_at.setdefault(replica, {})
        lanes[lane] = lanes.get(lane, 0) + generation.sequences

    def remove(self, item: ScheduledGeneration) -> None:
        """Takes out a generation that does not start where it waits. Raises `KeyError` if it does not wait."""
        super().remove(item)
        lanes, lane = self._lanes_at[item.replica], (item.replica, item.request.policy, item.needs_place)
        lanes[lane] -= item.sequences
        if not lanes[lane]:
            del lanes[lane]
        if not lanes:
            del self._lanes_at[item.replica]

    def size_at(self, replica: str, needs_place: bool | None = None) -> int:
        """The number of sequences that wait for the replica: the choices of a call each count.

        Args:
            needs_place: counts those alone that need a place, or that need none.
        """
        size = 0
        for lane, waiting in self._lanes_at.get(replica, {}).items():
            if needs_place is None or lane[2] == needs_place:
                size += waiting
        return size

    def items_at(self, replica: str) -> list[ScheduledGeneration]:
        """All that wait for the replica, the oldest first within each lane."""
        return [item for lane in self._lanes_at.get(replica, ()) for item in self.items_of(lane)]

    def next_at(
        self, replica: str, window: ReplicaWindow, leased: float, turn: float, place_turn: float
    ) -> ScheduledGeneration | None:
        """The generation that is next on the replica; `None` if none waits there that may start.

        Of one request those with a lease come first, then those that need a place and have it, then others.

        Args:
            leased: tokens of all leases there.
            turn: how far others may get ahead of a flow whose policy may not start, in virtual time at weight 1.
            place_turn: the same for a request that needs a place; further behind it does not wait for one.
        """
        waiting: list[tuple[float, float, bool, bool, ScheduledGeneration]] = []
        blocked: list[ScheduledGeneration] = []
        placeless: list[ScheduledGeneration] = []
        for lane in self._lanes_at.get(replica, ()):
            flow = self.first_flow_of(lane)
            item = self.first_of(lane, flow)
            assert item is not None
            own, part = item.assignment.leased_tokens, item.of_request.part
            if not window.may_start(lane[1]):
                blocked.append(item)
            elif item.needs_place and not window.has_place(item.kv_tokens, leased - own, item.sequences):
                placeless.append(item)
            else:
                of_part = 0.0 if part is None else part.virtual_time
                waiting.append((flow.virtual_time, of_part, not own, not item.needs_place, item))
        if len(waiting) > 1:
            waiting.sort(key=itemgetter(0, 1, 2, 3))

        def is_held(item: ScheduledGeneration) -> bool:
            behind = (_is_behind(each.of_request, item.of_request, turn) for each in blocked)
            return item.request.policy is not None and any(behind)

        for *_, item in waiting:
            if not is_held(item):
                behind = (each for each in placeless if _is_behind(each.of_request, item.of_request, place_turn))
                return next((each for each in behind if not is_held(each)), item)
        return None

    def lacks_place(self, replica: str, window: ReplicaWindow, leased: float) -> bool:
        """Whether one waits there that has no place."""
        firsts = (self.first_of(lane) for lane in self._lanes_at.get(replica, ()) if lane[2])
        return any(each and not window.has_place(each.kv_tokens, leased, each.sequences) for each in firsts)


class KnownRequests:
    """The requests with rollouts that are not released, and how long their generations are."""

    def __init__(self, queue: ReplicaQueues) -> None:
        """Knows no request, and expects `FIRST_EXPECTED_TOKENS`; the flows of requests are in `queue`."""
        self._queue = queue
        self.mean_tokens = FIRST_EXPECTED_TOKENS
        """Moving mean of the lengths of all generations."""
        self._by_id: dict[str, RequestState] = {}
        self._of_rollout: dict[str, RequestState] = {}

    def of(self, request: GenerationRequest) -> RequestState:
        """The request of this generation. Its rollout becomes known, until it is released."""
        of_request = self._of_rollout.get(request.rollout_id)
        if of_request is None:
            share = request.share
            of_request = self._by_id.get(share.id)
            if of_request is None:
                flow, part = self._flow_of(share)
                of_request = self._by_id[share.id] = RequestState(share.id, flow, part, self.mean_tokens)
            of_request.rollouts += 1
            self._of_rollout[request.rollout_id] = of_request
        return of_request

    def release(self, rollout_id: str) -> None:
        """Forgets a rollout that has no further generation. Ignores unknown ids."""
        of_request = self._of_rollout.pop(rollout_id, None)
        if of_request is None:
            return
        of_request.rollouts -= 1
        if not of_request.rollouts:
            self._queue.forget(of_request.flow, of_request.part)
            del self._by_id[of_request.id]

    def note_turns(self, of_request: RequestState) -> list[ScheduledGeneration]:
        """Records that its rollouts play several turns. Returns those that wait, the first time."""
        knew, of_request.plays_turns = of_request.plays_turns, True
        is_alone = knew or of_request.rollouts == 1
        return [] if is_alone else [each for each in self._queue if each.of_request is of_request]

    def learn(self, of_request: RequestState, tokens: float) -> None:
        """Records the length of a generation that has ended."""
        of_request.expected_tokens += LEARNING_RATE * (tokens - of_request.expected_tokens)
        self.mean_tokens += LEARNING_RATE * (tokens - self.mean_tokens)

    def _flow_of(self, share: RequestShare) -> tuple[RequestFlow, RequestFlow | None]:
        """The flow of a request, and the part of it that the request is."""
        if share.key is None:
            return self._queue.flow(share.id, share.weight), None
        flow = self._queue.flow(f"key {share.key}", share.key_weight)
        return flow, self._queue.part(flow, share.id, share.weight)


class ReplicaSet:
    """The replicas that take calls; `UNKNOWN_REPLICA` while none is listed."""

    def __init__(self, window_factor: float | None) -> None:
        self.capacity = EngineCapacity()
        self._window_factor = window_factor
        self.windows = {UNKNOWN_REPLICA: ReplicaWindow(self.capacity, window_factor)}
        self._known = WeakValueDictionary(self.windows)
        """With those of replicas that are not listed any more while they run generations: they may be listed again."""
        self.load_of_others: dict[str, int] = {}
        """Generations that count as load of a replica beside those of this ingress."""
        self.rolling: RollingActivation | None = None
        """Which replicas have which version, while they change one by one."""

    @property
    def largest_batch(self) -> float:
        """How many generations an engine runs at once; `_USUAL_BATCH` where it runs more, or does not say."""
        return min(self.capacity.sequences, _USUAL_BATCH)

    @property
    def are_all_suspect(self) -> bool:
        return all(window.is_suspect for window in self.windows.values())

    def admits(self, replica: str, request: GenerationRequest) -> bool:
        """Whether the replica is one that the request accepts, and has such a version, as far as known."""
        if request.replica not in ("", replica):
            return False
        return self.rolling is None or self.rolling.admits(replica, request)

    def admitting(self, request: GenerationRequest) -> Collection[str]:
        """Those with such a version. Where none has it, each refuses; the rollout learns from that how it goes on.

        For a request that names a replica: that one, or all if it is gone; its caller does not send it elsewhere.
        """
        if request.replica in self.windows:
            return (request.replica,)
        if self.rolling is None:
            return self.windows
        return [replica for replica in self.windows if self.admits(replica, request)] or self.windows

    def resize(self, capacity: EngineCapacity) -> None:
        self.capacity = capacity
        for window in self.windows.values():
            window.resize(capacity)

    def set_listed(self, replicas: Collection[str]) -> Collection[str]:
        """Sets the replicas that take calls; returns those that did before."""
        names = replicas or (UNKNOWN_REPLICA,)
        gone = self.windows.keys() - names
        for replica in names:
            if replica not in self.windows:
                window = self._known.get(replica) or ReplicaWindow(self.capacity, self._window_factor)
                window.resize(self.capacity)
                self.windows[replica] = self._known[replica] = window
                self.note_load(replica, window)
        for replica in gone:
            del self.windows[replica]
            self.load_of_others.pop(replica, None)
        return gone

    def note_load(self, replica: str, window: ReplicaWindow) -> None:
        if window.of_others or window.is_suspect:
            self.load_of_others[replica] = window.of_others + (SUSPECT_LOAD if window.is_suspect else 0)
        else:
            self.load_of_others.pop(replica, None)
