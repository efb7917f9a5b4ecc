"""The contract of `/policy`: how weights reach the service and what it says of them.

Versions are numbered upward and never change. `PUT /policy/versions/{version}` brings one, in one of these ways:

- `Content-Type: application/vnd.safetensors`: the body is a safetensors file, or a piece of one (`Content-Range: bytes
  first-last/total`; `*` for a total that is not known yet), each piece and the whole verified where the caller says
  their digests (`Content-Digest` of this body, `Repr-Digest` of all pieces together; RFC 9530, sha-256). With
  `Content-Encoding: zstd` the pieces together are one zstd stream. A piece that begins at 0 begins anew.
- `Content-Type: application/json`: a `CheckpointSource`, read from where it lies.

Or a trainer on the same fabric sends them straight into the engines, by a weight-transfer engine of vLLM's, and `POST
/policy/transfer/{init,start,update,finish}` are its steps: `init` brings trainer and replicas together, for as long as
the replicas are the same; the others are one transfer. The service then never has the weights: a replica that starts
later serves from the next full version or the next transfer on.

`PushOptions` stand in the query. The answer is 202 and an `UploadState` while pieces are missing, then 200 and a
`PolicyUpdate` once every replica serves the new weights. Times are in seconds, sizes in bytes.
"""

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import Field

from rollout_client.contract import Lenient, Strict

SAFETENSORS = "application/vnd.safetensors"
Version = Annotated[int, Field(ge=0)]
WeightsKind = Literal["full", "delta", "adapter"]
"""`full`: every tensor of the model's checkpoint, by its name there.
`delta`: for each changed tensor `name`, `{name}.gaps` (I32, one per changed value: how far its place in the flattened
tensor lies beyond that of the changed value before it, the first counted from 0) and `{name}.values` (the new
values, of the tensor's dtype).
`adapter`: a LoRA adapter as PEFT saves it, for the current full weights; its `adapter_config.json` stands as text in
the file's metadata, under `adapter_config`."""
PauseMode = Literal["keep", "wait", "abort"]
"""What becomes of generations under way: `keep` freezes them and goes on with the new weights, `wait` lets them end
first, `abort` cuts them, and their turns are played again, which costs none of their samples' `retries`."""
IfBusy = Literal["wait", "refuse"]


class SwitchOptions(Strict):
    """How the replicas change over. The query of `POST /policy/transfer/start`."""

    mode: PauseMode = "keep"
    """What becomes of generations under way. `keep`: paused, then continued with the new weights; `wait`: finished
    first; `abort`: cut, and their turns are played again, which costs none of the samples' `retries`."""
    reset_prefix_cache: bool = True
    """Whether the prefix cache is recomputed with the new weights, that of generations under way included."""
    if_busy: IfBusy = "wait"
    """Whether to wait for another update that is under way, or to refuse this one (409)."""


class PushOptions(SwitchOptions):
    """The query of `PUT /policy/versions/{version}`."""

    kind: WeightsKind = "full"
    """What the file holds. `full`: every tensor of the model; `delta`: the changed values of the version `base`;
    `adapter`: a LoRA adapter for the current full weights."""
    base: Version | None = None
    """The version that a delta changes; only for `kind=delta`."""


class CheckpointSource(Strict):
    """Weights that the service fetches itself: a `.safetensors` file or a folder of them."""

    checkpoint: str
    """A path or an fsspec URL under one of the service's configured roots."""


class TensorLayout(Lenient):
    """Type and shape of one tensor."""

    dtype: str
    """As safetensors names it: `BF16`, `F32`, ..."""
    shape: list[int]
    """Size of each dimension."""


class PolicyLayout(Lenient):
    """`GET /policy/layout`: the tensors that full weights have, no more and no less."""

    tensors: dict[str, TensorLayout]
    """By name."""


class VersionInfo(Lenient):
    """A version that the service keeps."""

    version: Version
    """Its number."""
    kind: Literal["initial", "full", "delta", "adapter", "transfer"]
    """How its weights came: with the model, by an upload of this kind, or by a weight transfer."""
    base: Version | None = None
    """The version that a delta changed."""
    checksum: str | None = None
    """Sha-256 over the tensors (`weights.safetensors_file.Checksum`); null where the service never held them."""
    size_bytes: int = 0
    """Size of its file."""
    created_at: datetime
    """When it was complete."""


class ReplicaPolicy(Lenient):
    """What one generator replica has loaded."""

    replica_id: str
    """Serve's id of the replica."""
    version: Version
    """The version that it has loaded."""
    checksum: str | None = None
    """Sha-256 over the full weights as they lie in the engine, without an adapter on top of them; the same on all
    replicas, null until it is computed."""


class PolicyState(Lenient):
    """`GET /policy`; with `min_version` in the query it answers once that version is current, or 409 after `wait_s`."""

    current: Version
    """What every replica serves, and what a replica that starts loads first."""
    versions: list[VersionInfo]
    """The versions that the service keeps, oldest first."""
    replicas: list[ReplicaPolicy]
    """What each generator replica has loaded."""
    updating_to: Version | None = None
    """The version that an update under way brings."""
    transfer_world_size: int | None = None
    """Processes that take part in a weight transfer: the trainer's one, rank 0, and every worker of every replica."""


class UploadState(Lenient):
    """`GET /policy/versions/{version}/upload`: what has arrived of a version that is not complete."""

    version: Version
    """The version that is being uploaded."""
    received_bytes: int
    """How many bytes have arrived: the next chunk begins here."""
    total_bytes: int | None = None
    """Size of the whole upload; null while it is not known."""


class ReplicaUpdate(Lenient):
    """What became of an update on one replica."""

    replica_id: str
    """Serve's id of the replica."""
    status: Literal["swapped", "replaced"]
    """`replaced`: it failed, `error` says how, and another one takes its place, which begins with the new version."""
    error: str | None = None
    """Why the update failed on this replica."""
    load_s: float = 0.0
    """Fetching the weights to the replica, beside its generations."""
    swap_s: float = 0.0
    """Putting them in place of the old ones."""
    pause_s: float = 0.0
    """How long no token was generated."""


class TransferInit(Strict):
    """Body of `POST /policy/transfer/init`."""

    init_info: dict[str, Any]
    """As vLLM's trainer side sends it to one engine; each replica is given a `rank_offset` of its own."""


class TransferWorld(Lenient):
    """Its answer."""

    world_size: int = Field(ge=1)
    """Number of processes in the transfer, the trainer's one included."""


class TransferUpdate(Strict):
    """Body of `POST /policy/transfer/update`."""

    update_info: dict[str, Any] | list[dict[str, Any]]
    """As vLLM's trainer side sends it; a list has one entry for each worker, in order of their ranks."""


class PolicyUpdate(Lenient):
    """A version that every replica serves now."""

    version: Version
    """Its number."""
    checksum: str | None
    """Sha-256 over its tensors; null where the service never held them."""
    replicas: list[ReplicaUpdate]
    """What became of the update on each replica."""
