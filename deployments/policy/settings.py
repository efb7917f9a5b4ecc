"""Settings of the policy store and of weight transfers: where versions are kept, what may be read, and time limits."""

from typing import Literal

import fsspec  # type: ignore[import-untyped]
from pydantic import Field, field_validator

from deployments.policy.trusted_trainers import TrustedTrainer
from deployments.strict_settings import StrictSettings
from rollout_client.contract.policy import PauseMode


class TransferSettings(StrictSettings):
    """Weights from a trainer's memory straight into the engines. Off unless `trainers` names who may send them."""

    trainers: list[str] = Field(default_factory=list)
    """Where trainers may listen that replicas connect to: `host:port` or `host:first-last`, where the host is a name,
    an IP address or a network (`10.1.0.0/16:29500-29600`, `[fd00::1]:29500`). List only machines that you trust as much
    as the service's own: vLLM unpickles what they send."""
    rendezvous_timeout_s: float = Field(default=30, gt=0)
    """A trainer that a replica cannot connect to within so many seconds is refused. Generations go on meanwhile."""

    @field_validator("trainers")
    @classmethod
    def are_addresses(cls, trainers: list[str]) -> list[str]:
        for trainer in trainers:
            TrustedTrainer.parse(trainer)
        return trainers


class FollowSettings(StrictSettings):
    """Versions that a trainer publishes in a folder. Each is a subfolder with a checkpoint, whose name ends in the
    number of the version: `weight_v000007`, `step-7`."""

    folder: str
    """Path or fsspec URL, as the service's head node sees it. All that lies under it may be read."""
    format: Literal["safetensors", "miles_disk_delta"]
    """`safetensors`: each version is a whole checkpoint. `miles_disk_delta`: a version may hold the changed bytes since
    an earlier one in their place, as miles and slime write them; version 0 is the model that the service starts with.
    """
    poll_s: float = Field(default=2, gt=0)
    """Seconds between two looks at the folder."""
    mode: PauseMode = "keep"
    """The fate of generations under way, as in a push."""

    @field_validator("folder")
    @classmethod
    def can_be_read(cls, folder: str) -> str:
        if "://" in folder:
            try:
                fsspec.get_filesystem_class(folder.partition("://")[0])
            except (ValueError, ImportError) as error:
                raise ValueError(f"{folder} cannot be read here: {error}") from error
        return folder


class PolicySettings(StrictSettings):
    folder: str | None = None
    """Where versions are kept. If it outlives the machine, so does the current version. Default: a temporary folder of
    the Ray cluster, which lives as long as the cluster."""
    copy_to_nodes: bool = False
    """Whether each node of the cluster copies a version to its own disk even if it can read `folder`, as when that is a
    slow network file system. Nodes that cannot read it always do; the policy store's own node never does."""
    run: str | None = Field(default=None, min_length=1, max_length=200)
    """Name of the training run. A folder with versions of another run, or of another model, is refused at the start.
    Default: the name that the folder records, which is drawn at its first start."""
    checkpoint_roots: list[str] = Field(default_factory=list)
    """Paths and fsspec URLs under which checkpoints may lie that the service reads itself; none by default."""
    activation: Literal["together", "rolling"] = "together"
    """How replicas change to new weights once all have read them. `together`: all at once. `rolling`: one after the
    other, so that the others generate; meanwhile a request goes to a replica with a version that it accepts."""
    follow: FollowSettings | None = None
    """The folder in which a trainer publishes versions, which the service takes by itself; by default none."""
    keep_versions: int = Field(default=2, ge=1)
    """Full versions that stay on disk for rollbacks, replays and as bases of deltas, including the current one."""
    wait_s: float = Field(default=60, ge=0)
    """The longest time, in seconds, that a rollout waits for a version that it demands."""
    command_timeout_s: float = Field(default=600, gt=0)
    """A replica that takes longer, in seconds, for one step of an update is replaced."""
    command_timeout_s_per_gb: float = Field(default=20, ge=0)
    """This limit, and that of the canary, are longer by so many seconds for each gigabyte of weights."""
    canary_timeout_s: float = Field(default=60, gt=0)
    """New weights are refused if the replica that tries them needs longer, in seconds, to generate a few tokens."""
    transfer_idle_s: float = Field(default=20, gt=0)
    """A weight transfer is abandoned, and its replicas load the current weights again, if its trainer is silent for so
    many seconds: between two steps of the transfer, or between two tensors."""
    transfer: TransferSettings = TransferSettings()
    """Weights from a trainer's memory straight into the engines."""
