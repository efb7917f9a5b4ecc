"""The protocol between the policy store and generator replicas: commands, reports, and the port that replicas poll.

A replica registers, and then polls for commands. `PolicyStore` and, over its Serve handle, its client
implement `CommandSource`.
"""

from collections.abc import Mapping
from dataclasses import astuple, dataclass, field
from typing import Any, Literal, Protocol

from rollout_client.contract.policy import PauseMode

StoredKind = Literal["full", "adapter"]
DRAFT = "draft."
"""Begins the names of tensors of the model that drafts, in full weights that bring it along."""


@dataclass(frozen=True, slots=True)
class SwapOptions:
    """How generation is paused while a replica changes its weights."""

    mode: PauseMode = "keep"
    reset_prefix_cache: bool = True


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of the policy store, and how a process on another node knows it again in a folder that both can read.

    In a report on `SaveTransfer` it is a file of the replica.
    """

    path: str
    node_id: str
    """The policy store's node, or the replica's."""
    inode: int
    modified_ns: int
    is_copied: bool = False
    """Whether other nodes fetch the file even if they can read it."""


@dataclass(frozen=True, slots=True)
class VersionPayload:
    """The weights of one version: what they are and where their bytes are. Never the bytes, nor references to Ray
    objects: Serve pickles its messages itself, and an object that a message refers to is kept for ever.
    """

    version: int
    kind: StoredKind
    size_bytes: int
    """Size of the safetensors file."""
    checksum: str
    """The `Checksum` of its tensors. It was computed when the version was validated; of a delta its sender says it, and
    what a node makes of the delta has to have it."""
    file: StoredFile
    """The weights; not used where they come as a delta."""
    keep: frozenset[int] = frozenset()
    """Versions whose files stay on the nodes; they include this one."""
    adapter_config: str | None = None
    """Text of PEFT's `adapter_config.json`; adapters only."""
    delta: "DeltaPayload | None" = None
    """Where the node makes the weights."""
    key: str | None = field(default=None, compare=False)
    """Identifies the content of the version for the store; the replica returns it when it registers."""
    name: str | None = None
    """The named policy that the adapter is a version of; `None` for versions of the one without a name."""
    base: int | None = None
    """The full weights that the version of a named policy is an adapter for."""


@dataclass(frozen=True, slots=True)
class DeltaPayload:
    """The two files that make the weights of a payload: few bytes for nodes that have, or can read, the older one."""

    base: VersionPayload
    """An older version."""
    changes: VersionPayload
    """The changes since then, as if they were the weights: size and checksum are those of their own file."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Fetch the weights and prepare them for `Swap`, while generations go on."""

    payload: VersionPayload


@dataclass(frozen=True, slots=True)
class Swap:
    """Replace the weights in the engine by those that were staged."""

    options: SwapOptions
    is_trial: bool = False
    """Whether generations wait, after the swap too, until `AcceptRequests` or the next swap that is not a trial."""


@dataclass(frozen=True, slots=True)
class Canary:
    """Generate some tokens with the weights that a trial has swapped in; fails if the engine cannot."""

    timeout_s: float
    """It has failed after so many seconds."""


@dataclass(frozen=True, slots=True)
class SetAdapters:
    """Serve exactly these versions of named policies, beside the full weights; generations go on meanwhile.

    What the replica has already is not loaded again. The others are loaded, and each generates some tokens (a canary).
    If that fails for one, the replica goes on with what it served before.
    """

    payloads: tuple[VersionPayload, ...]
    canary_timeout_s: float
    """A canary has failed after so many seconds."""
    is_trial: bool = False
    """Whether they are loaded and tried only, and no generation of a rollout uses them yet."""


@dataclass(frozen=True, slots=True)
class AcceptRequests:
    """The replica has the current weights and may accept requests; one that is starting becomes ready.

    Ends a trial: generations go on.
    """


@dataclass(frozen=True, slots=True)
class ComputeChecksum:
    """Begin to compute the checksum of the weights in the engine, while generations go on, and tell it when it is
    complete (`record_checksum`). A change of the weights ends the computation."""


@dataclass(frozen=True, slots=True)
class Hold:
    """Generate nothing until `Release`, the next change of weights or adapters, or the end of the lease."""

    mode: PauseMode
    lease_s: float
    """In seconds from the begin. It has failed, and generations go on, if those of "wait" have not ended by then."""


@dataclass(frozen=True, slots=True)
class Release:
    """Generate again, if a `Hold` is all that keeps the engine from it."""


@dataclass(frozen=True, slots=True)
class InitTransfer:
    """Connect to the trainer while generations go on; `init_info` is what vLLM's weight-transfer engine takes."""

    init_info: Mapping[str, Any]
    timeout_s: float
    """It has failed after so many seconds."""


@dataclass(frozen=True, slots=True)
class StartTransfer:
    """Pause generation and prepare to receive weights from the trainer."""

    options: SwapOptions
    header: bytes | None = None
    """Write what arrives to a safetensors file too, which begins with these bytes; `None`: not on this replica."""


@dataclass(frozen=True, slots=True)
class UpdateTransfer:
    """Receive what the trainer sends meanwhile; `update_info` is what vLLM's weight-transfer engine takes."""

    update_info: Any
    silence_s: float
    """It has failed if nothing arrives for so many seconds."""


@dataclass(frozen=True, slots=True)
class AbandonTransfer:
    """The transfer broke off: let go of the trainer. The engine stays paused until full weights were swapped in."""


@dataclass(frozen=True, slots=True)
class ApplyTransfer:
    """All weights have been received: put them in place, and stay paused."""


@dataclass(frozen=True, slots=True)
class FinishTransfer:
    """The weights that were received are `version`: resume generation."""

    version: int
    key: str | None = field(default=None, compare=False)
    """As in `VersionPayload`."""


@dataclass(frozen=True, slots=True)
class SaveTransfer:
    """Finish the file that `StartTransfer.header` asked for, as the weights of `version`; generations go on."""

    version: int


Command = (
    Stage
    | Swap
    | Canary
    | SetAdapters
    | AcceptRequests
    | ComputeChecksum
    | Hold
    | Release
    | InitTransfer
    | StartTransfer
    | UpdateTransfer
    | AbandonTransfer
    | ApplyTransfer
    | FinishTransfer
    | SaveTransfer
)


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """The versions that an engine holds: full weights, and perhaps an adapter for them."""

    full: int = 0
    adapter: int | None = None

    @property
    def version(self) -> int:
        """The version that generated tokens are labelled with."""
        return self.full if self.adapter is None else self.adapter


@dataclass(frozen=True, slots=True)
class CommandCosts:
    """Costs of commands in seconds and bytes, which can be added; 0 for commands that have no such cost."""

    load_s: float = 0.0
    """`Stage`: fetching the weights. `SetAdapters`: all of it."""
    swap_s: float = 0.0
    """`Swap`, `FinishTransfer`: replacing the weights."""
    pause_s: float = 0.0
    """`Swap`, `FinishTransfer`: how long generation was paused."""
    canary_s: float = 0.0
    """`AcceptRequests`: how long generations waited, after the swap, for the end of the trial."""
    fetched_bytes: int = 0
    """`Stage`, `SetAdapters`: what this replica fetched from other nodes."""
    read_bytes: int = 0
    """`Stage`: size of the files that this replica read, of the delta in place of the weights if its node had the base.
    """

    def __add__(self, other: "CommandCosts") -> "CommandCosts":
        return CommandCosts(*(one + another for one, another in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True, slots=True)
class CommandReport:
    """A replica's report on one command."""

    command_number: int
    loaded: LoadedWeights
    """The versions that the engine holds after the command."""
    error: str | None = None
    """Why the command failed."""
    broken: bool = False
    """Whether the replica cannot be used any more."""
    costs: CommandCosts = field(default_factory=CommandCosts)
    saved: VersionPayload | None = None
    """By `SaveTransfer`: the weights, in a file on the replica's node."""
    held_s: float = 0.0
    """How much longer a `Hold` keeps the engine from generating, unless something ends it."""
    changes_nothing: bool = False
    """By `Canary` and `SetAdapters`: the weights that were tried change no log-probability of the canary. Full weights
    may be those from before; an adapter is zero, or so small that the engine's precision does not show it."""


@dataclass(frozen=True, slots=True)
class NumberedCommand:
    """A command, with the number by which its report refers to it."""

    number: int
    command: Command


@dataclass(frozen=True, slots=True)
class ReplicaRegistration:
    """A replica's description of itself when it registers."""

    replica_id: str
    actor: Any
    """Handle of the replica's Ray actor, to find out whether it lives, and to end it."""
    workers: int
    """Processes that share one copy of the model."""
    loaded: LoadedWeights = field(default_factory=LoadedWeights)
    keys: Mapping[int, str] = field(default_factory=dict)
    """The `key` that came with each of the loaded versions."""
    is_on_trial: bool = False
    """Whether `loaded` is on trial: the replica never accepted requests with it."""
    named: Mapping[str, int] = field(default_factory=dict)
    """By name, the version of each named policy that it serves."""
    held_s: float = 0.0
    """As in `CommandReport`."""


class ReplicaNotRegistered(Exception):
    """The store does not know the replica, or does not know it any more: it has to register (again)."""


class CommandSource(Protocol):
    """Every call raises `PolicyStoreLost` if the store cannot be reached."""

    async def register(self, registration: ReplicaRegistration) -> None:
        """Adds the replica; a replica of the same id that was registered before is forgotten with its commands."""
        ...

    async def next_command(self, replica_id: str, report: CommandReport | None) -> NumberedCommand | None:
        """Reports on the previous command and waits for the next one; `None` if none was given for a while.

        Raises:
            ReplicaNotRegistered: the replica has to register first.
        """
        ...

    async def record_checksum(self, replica_id: str, loaded: LoadedWeights, checksum: str) -> None:
        """Tells the checksum that `ComputeChecksum` asked for; ignored if the replica has changed its weights since.

        Raises:
            ReplicaNotRegistered: the replica has to register first.
        """
        ...
