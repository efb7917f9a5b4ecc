"""The generator replicas as one ingress replica knows them. State machines: no I/O, no clock, no Ray.

`ReplicaSet` has their windows, and which versions they have. `ReplicaQueues` has the generations that wait for each,
and which of them is next there: one of the flow with the lowest virtual time (`fair_queue.py`) among those whose policy
may start there. A flow whose policy may not start, because the engine holds no more adapters, falls behind those that
go on; when it is behind by more than a turn, they wait until the generations of one policy have ended.

`ScheduledGeneration` is one that waits or has started, `RequestState` the request that it is of.
"""

from collections.abc import Collection
from dataclasses import dataclass
from weakref import WeakValueDictionary

from deployments.protocols.generation import GenerationRequest
from deployments.protocols.model_server import ServedRequest
from deployments.protocols.weight_versions import RollingActivation
from service.scheduling.affinity import Assignment
from service.scheduling.fair_queue import FairQueue, Flow
from service.scheduling.window import EngineCapacity, ReplicaWindow

PREFILL_COST = 0.1
"""Cost of computing a prompt token, in generated tokens: engines compute about ten times as many prompt tokens a
second."""
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
    virtual_time: int = 0
    """The virtual time that the engine gets."""

    @classmethod
    def of(cls, request: GenerationRequest, of_request: RequestState, assignment: Assignment) -> "ScheduledGeneration":
        sequences = request.choices if isinstance(request, ServedRequest) else 1
        return cls(request, of_request, assignment, sequences=sequences)

    @property
    def has_started(self) -> bool:
        return self.window is not None

    def may_try(self, replica: str) -> bool:
        """Whether it may try a suspect replica: its rollout was not lost there last, and it names no other one."""
        return self.assignment.avoided != replica and self.request.replica in ("", replica)

    def estimate(self) -> None:
        """Sets its cost and its tokens in the KV cache, on the replica to which it is assigned now."""
        prompt_tokens = len(self.request.prompt_token_ids)
        new_tokens = self.sequences * min(self.of_request.expected_tokens, self.request.max_new_tokens)
        self.cost = new_tokens + PREFILL_COST * max(prompt_tokens - self.assignment.cached_tokens, 0)
        self.kv_tokens = new_tokens + prompt_tokens - self.assignment.shared_tokens


RequestFlow = Flow[ScheduledGeneration, tuple[str, str | None]]

ReplicaLane = tuple[str, str | None]
"""A replica and the policy that its generations name."""


class ReplicaQueues(FairQueue[ScheduledGeneration, ReplicaLane]):
    """One lane for each replica and policy."""

    def __init__(self) -> None:
        super().__init__()
        self._policies: dict[str, dict[str | None, int]] = {}
        """By replica, how many sequences of each policy wait there."""

    def wait(self, generation: ScheduledGeneration, replica: str, rank: int) -> None:
        policy = generation.request.policy
        of_request = generation.of_request
        self.add(generation, (replica, policy), of_request.flow, rank, of_request.part)
        policies = self._policies.setdefault(replica, {})
        policies[policy] = policies.get(policy, 0) + generation.sequences

    def remove(self, item: ScheduledGeneration) -> None:
        """Takes out a generation that does not start where it waits. Raises `KeyError` if it does not wait."""
        super().remove(item)
        replica, policy = item.replica, item.request.policy
        policies = self._policies[replica]
        policies[policy] -= item.sequences
        if not policies[policy]:
            del policies[policy]
        if not policies:
            del self._policies[replica]

    def size_at(self, replica: str) -> int:
        """The number of sequences that wait for the replica: the choices of a call each count."""
        return sum(self._policies[replica].values()) if replica in self._policies else 0

    def items_at(self, replica: str) -> list[ScheduledGeneration]:
        """All that wait for the replica, the oldest first within each policy."""
        return [item for policy in self._policies.get(replica, ()) for item in self.items_of((replica, policy))]

    def next_at(self, replica: str, window: ReplicaWindow, turn: float) -> ScheduledGeneration | None:
        """The generation that is next on the replica; `None` if none waits there that may start.

        Args:
            turn: how far others may get ahead of a flow whose policy may not start, in virtual time at weight 1.
        """
        flows = {policy: self.first_flow_of((replica, policy)) for policy in self._policies.get(replica, ())}
        blocked = [flow for policy, flow in flows.items() if not window.may_start(policy)]
        able = [policy for policy in flows if window.may_start(policy)]
        for policy in sorted(able, key=lambda policy: flows[policy].virtual_time):
            ahead = flows[policy].virtual_time
            if policy is None or all(ahead - flow.virtual_time <= turn / flow.weight for flow in blocked):
                return self.first_of((replica, policy))
        return None


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
