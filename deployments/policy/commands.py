"""The commands that the policy store gives to generator replicas, and what the replicas tell it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rollout_client.policy_contract import PauseMode

StoredKind = Literal["full", "adapter"]


@dataclass(frozen=True, slots=True)
class SwapOptions:
    """How a replica changes its weights."""

    mode: PauseMode = "keep"
    reset_prefix_cache: bool = True


@dataclass(frozen=True, slots=True)
class VersionPayload:
    """One version's weights on their way: `chunks` are Ray objects, together the bytes of a safetensors file."""

    version: int
    kind: StoredKind
    chunks: tuple[Any, ...]
    adapter_config: str | None = None


@dataclass(frozen=True, slots=True)
class Stage:
    """Bring the weights to where a swap finds them, while generations go on."""

    payload: VersionPayload


@dataclass(frozen=True, slots=True)
class Swap:
    """Put what was staged in place of the weights."""

    options: SwapOptions


@dataclass(frozen=True, slots=True)
class AcceptRequests:
    """The replica has the current weights: a replica that starts may call itself ready."""


@dataclass(frozen=True, slots=True)
class InitTransfer:
    """Rendezvous with the trainer; `init_info` is that of vLLM's weight-transfer engine."""

    init_info: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class StartTransfer:
    """Pause, and make ready for weights that the trainer sends."""

    options: SwapOptions


@dataclass(frozen=True, slots=True)
class UpdateTransfer:
    """Receive what the trainer sends now."""

    update_info: Any


@dataclass(frozen=True, slots=True)
class ApplyTransfer:
    """All has been sent: make it the weights, and stay paused."""


@dataclass(frozen=True, slots=True)
class FinishTransfer:
    """What was received is `version`; go on."""

    version: int


Command = Stage | Swap | AcceptRequests | InitTransfer | StartTransfer | UpdateTransfer | ApplyTransfer | FinishTransfer


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """What an engine holds: `full` weights, and the adapter on top of them, if any."""

    full: int = 0
    adapter: int | None = None

    @property
    def version(self) -> int:
        """The version that its tokens carry."""
        return self.full if self.adapter is None else self.adapter


@dataclass(frozen=True, slots=True)
class CommandReport:
    """A replica's answer to a command, with what it holds now.

    `error` says why it could not be carried out; `broken` that the replica is of no use any more.
    """

    command_number: int
    loaded: LoadedWeights
    error: str | None = None
    broken: bool = False
    load_s: float = 0.0
    swap_s: float = 0.0
    pause_s: float = 0.0


@dataclass(frozen=True, slots=True)
class NumberedCommand:
    """A command with the number that its report names."""

    number: int
    command: Command


@dataclass(frozen=True, slots=True)
class ReplicaRegistration:
    """Who a replica is when it joins: `actor` can be asked whether it lives, `workers` share one copy of the model."""

    replica_id: str
    actor: Any
    workers: int
    loaded: LoadedWeights = field(default_factory=LoadedWeights)
