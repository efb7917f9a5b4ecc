"""The records of `GenerationScheduler`: a generation that waits or has started, and the request that it is of."""

from dataclasses import dataclass

from deployments.protocols.generation import GenerationRequest
from deployments.protocols.model_server import ServedRequest
from service.scheduling.fair_queue import Flow
from service.scheduling.replica_affinity import Assignment
from service.scheduling.replica_window import ReplicaWindow

UNKNOWN_REPLICA = ""
"""Stands for whichever replica Serve chooses, while none is known."""


@dataclass(slots=True, eq=False)
class RequestState:
    """What the scheduler knows of one request."""

    id: str
    flow: "RequestFlow"
    """As which it shares the engines: its own, or that of its caller's key."""
    part: "RequestFlow | None"
    """The part of the flow that it is, if the flow is a key's."""
    expected_tokens: float
    """Mean length of its generations."""
    rollouts: int = 0
    """Those that are not released."""


@dataclass(slots=True, eq=False)
class ScheduledGeneration:
    """A generation that waits, or that has started on `replica`."""

    request: GenerationRequest
    of_request: RequestState
    assignment: Assignment
    cost: float = 0.0
    """What its request is charged, in generated tokens."""
    kv_tokens: float = 0.0
    """What it needs of the KV cache at its end, without `shared_tokens`."""
    sequences: int = 1
    """Texts that the engine generates for it at once."""
    shared_tokens: int = 0
    """Tokens of its prompt that another rollout of its group holds there."""
    replica: str = UNKNOWN_REPLICA
    """Where it waits or runs."""
    window: ReplicaWindow | None = None
    """The window in which it counts; `None` until it starts and after it has ended."""
    virtual_time: int = 0

    @classmethod
    def of(cls, request: GenerationRequest, of_request: RequestState, assignment: Assignment) -> "ScheduledGeneration":
        sequences = request.choices if isinstance(request, ServedRequest) else 1
        return cls(request, of_request, assignment, sequences=sequences)

    @property
    def has_started(self) -> bool:
        return self.window is not None

    def may_try(self, replica: str) -> bool:
        """Whether it may be the one that tries a suspect replica: its rollout was not lost there last."""
        return self.assignment.avoided != replica


RequestFlow = Flow[ScheduledGeneration, tuple[str, str | None]]
