"""The generator replicas as one ingress replica knows them. State machines: no I/O, no clock, no Ray.

`ReplicaSet` has their windows, and which versions they have; a replica that is listed again still counts the
generations that it had when it was not. `ReplicaQueues` has the generations that wait for each, and which of them is
next there: one of the flow with the lowest virtual time (`fair_queue.py`) among those whose policy may start there
(`AdapterTurns`). A flow whose policy may not start falls behind those that go on; when it is behind by more than a
turn, the turn of the policy that would go on ends.

`ScheduledGeneration` is one that waits or has started, `RequestState` the request that it is of.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from deployments.protocols.generation import GenerationRequest
from deployments.protocols.model_server import ServedRequest
from deployments.protocols.weight_versions import RollingActivation
from service.scheduling.affinity import Assignment
from service.scheduling.fair_queue import FairQueue, Flow
from service.scheduling.window import AdapterTurns, EngineCapacity, ReplicaWindow

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
    """Tokens of the KV cache that it needs at its end, without `shared_tokens`."""
    sequences: int = 1
    """Texts that the engine generates for it at once."""
    shared_tokens: int = 0
    """Tokens of its prompt that another rollout of its group holds there."""
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
        self.shared_tokens = self.assignment.shared_tokens
        self.kv_tokens = new_tokens + prompt_tokens - self.shared_tokens


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
        replica, policy = self.lane_of(item)
        super().remove(item)
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

    def next_at(self, replica: str, turns: AdapterTurns, turn: float) -> ScheduledGeneration | None:
        """The generation that is next on the replica; `None` if none waits there that may start.

        Args:
            turn: how far others may get ahead of a flow whose policy may not start, in virtual time at weight 1.
        """
        policies = self._policies.get(replica)
        if policies is None:
            return None
        if policies.keys() == {None} and not turns.needs_turn(None):
            return self.first_of((replica, None))
        may_start = [policy for policy in policies if turns.may_start(policy)]
        for policy in sorted(may_start, key=lambda policy: self.first_flow_of((replica, policy)).virtual_time):
            flow = self.first_flow_of((replica, policy))
            if not self._turn_is_over(replica, policy, flow.virtual_time, turns, turn):
                return self.first_of((replica, policy))
            turns.end_turn(policy)
        return None

    def _turn_is_over(
        self, replica: str, policy: str | None, virtual_time: float, turns: AdapterTurns, turn: float
    ) -> bool:
        """Whether another policy, which may not start, has waited for more than a turn, here or in another ingress."""
        if not turns.needs_turn(policy):
            return False
        if turns.passes_over_others(policy, turn):
            return True
        if turns.may_start_without_end_of(policy):
            return False
        behind = [
            flow for flow in self._blocked(replica, turns) if virtual_time - flow.virtual_time > turn / flow.weight
        ]
        return len(behind) > turns.ending

    def _blocked(self, replica: str, turns: AdapterTurns) -> Iterator[Flow[ScheduledGeneration, ReplicaLane]]:
        """The first flow of each policy that may not start."""
        for policy in self._policies.get(replica, ()):
            if not turns.may_start(policy):
                yield self.first_flow_of((replica, policy))


class ReplicaSet:
    """The replicas that take calls; `UNKNOWN_REPLICA` while none is listed."""

    def __init__(self, window_factor: float | None) -> None:
        self.capacity = EngineCapacity()
        self._window_factor = window_factor
        self.windows = {UNKNOWN_REPLICA: ReplicaWindow(self.capacity, window_factor)}
        self._windows_of_gone: dict[str, ReplicaWindow] = {}
        """Windows of replicas that are not listed any more: one that is listed again may still run generations."""
        self.load_of_others: dict[str, int] = {}
        """Generations that count as load of a replica beside those of this ingress."""
        self.rolling: RollingActivation | None = None
        """Which replicas have which version, while they change one by one."""

    @property
    def has_suspects(self) -> bool:
        return any(window.is_suspect for window in self.windows.values())

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
                window = self._windows_of_gone.pop(replica, None) or ReplicaWindow(self.capacity, self._window_factor)
                window.resize(self.capacity)
                self.windows[replica] = window
                self.note_load(replica, window)
        for replica in gone:
            window = self.windows.pop(replica)
            if window.generations:
                self._windows_of_gone[replica] = window
            self.load_of_others.pop(replica, None)
        return gone

    def is_listed(self, replica: str, window: ReplicaWindow) -> bool:
        """Whether the window is that of a replica that takes calls. Forgets that of another one if it is empty."""
        if self.windows.get(replica) is window:
            return True
        if not window.generations:
            self._windows_of_gone.pop(replica, None)
        return False

    def note_load(self, replica: str, window: ReplicaWindow) -> None:
        if window.of_others or window.is_suspect:
            self.load_of_others[replica] = window.of_others + (SUSPECT_LOAD if window.is_suspect else 0)
        else:
            self.load_of_others.pop(replica, None)
