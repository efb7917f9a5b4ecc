"""The contract of `/policy`: how a trainer sends weights to the service, and what the service reports about them.

The service serves one version of the full weights at a time. Versions are numbers that only increase, and a version
never changes. There are two ways to send one.

**Upload.** `PUT /policy/versions/{version}` with one of these bodies, and `PushOptions` in the query:

- `Content-Type: application/vnd.safetensors`: a safetensors file, or one chunk of it. A chunk names its place by
  `Content-Range: bytes first-last/total`, with `*` as the total while that is unknown. Its first byte must not lie
  beyond the bytes that have arrived; what had arrived from there on is discarded, so a chunk at byte 0 starts again.
  Uploads are resumable: after a disconnect, `GET /policy/versions/{version}/upload` says how many bytes have arrived.
  With `Content-Encoding: zstd`, all chunks together are one zstd stream. The last chunk, or the only one, may name the
  content of the file by `Weights-Digest`: 64 hexadecimal digits, `rollout_client.weights.checksum.weights_digest`. The
  service verifies it in the pass over the data that it makes anyway, and answers 400 (`chunk-damaged`) where what has
  arrived differs. It knows a repeated push by it, too.
- `Content-Type: application/json`: a `CheckpointSource`, which the service reads itself.

With `kind=adapter&name=run-b` in the query, the version is one of the named policy `run-b`, which is served beside the
full weights and other named policies, and counts its own versions from 1.

The answer is 202 with an `UploadState` while chunks are missing. After the last chunk the service validates the weights
and loads them into every replica; the answer is then 200 with a `PolicyUpdate`.

**Transfer.** A trainer on the same network sends the weights straight into the engines, with one of vLLM's
weight-transfer backends, by vLLM's own routes and client, if the config has `trainers` and lists the trainer's address
(`policy.transfer.trainers`). One replica saves what arrives, and the policy store gets it afterwards: then the version
has a checksum. Where that fails, a replica that starts later waits for the next full version or the next transfer.

Times are in seconds, sizes in bytes.
"""

from datetime import datetime
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rollout_client.contract.base import Lenient, PolicyName, Strict, label_of

SAFETENSORS = "application/vnd.safetensors"
WEIGHTS_DIGEST = "weights-digest"
"""The header that names the content of an upload."""
Version = Annotated[int, Field(ge=0)]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
"""Sha-256 over all tensors of a version, as in `VersionInfo`."""
WeightsKind = Literal["full", "partial", "delta", "adapter"]
PauseMode = Literal["keep", "wait", "abort"]
IfBusy = Literal["wait", "refuse"]


class SwitchOptions(Strict):
    """How the replicas change to new weights."""

    mode: PauseMode = "keep"
    """The fate of generations in progress. `keep`: they pause, and continue with the new weights. `wait`: they
    finish first. `abort`: they are interrupted, and go on in the middle of their messages with the new weights as new
    generations; this does not count as one of the request's `retries`."""
    reset_prefix_cache: bool = True
    """Whether to drop the KV cache of the old weights; the cache of paused generations is then computed again too.
    Without it, tokens in the cache keep what the old weights computed."""
    if_busy: IfBusy = "wait"
    """Behaviour while another update is in progress: `wait` for its end, or `refuse` with 409."""


class PushOptions(SwitchOptions):
    """The query of `PUT /policy/versions/{version}`."""

    kind: WeightsKind = "full"
    """The content of the file. `full`: every tensor of the model's checkpoint, under its name there. `partial`: some of
    these tensors; the others stay as they are in the version `base`. `delta`: for each changed tensor `name`,
    `{name}.gaps` (I32) and `{name}.values` (the new values, in the tensor's dtype); a gap is the distance of a changed
    value from the changed value before it in the flattened tensor, the first gap is counted from index 0. `adapter`: a
    LoRA adapter as PEFT saves it, for the current full weights; the file's metadata hold the text of its
    `adapter_config.json` under `adapter_config`."""
    base: Version | None = None
    """The version that a delta changes, or that has the other tensors of partial weights. Required for `kind=delta`;
    for `kind=partial` by default the full weights that are current when all of the upload has arrived. For
    `kind=adapter` the full weights that it was trained on: it is refused (409) if others are current. Not allowed for
    `kind=full`."""
    checksum: Sha256 | None = None
    """Sha-256 over all tensors of the full weights or the adapter, as in `VersionInfo`; weights with another one are
    refused. With it a delta of the current version goes to the engines' nodes as it is, and is applied there; without
    it the service has to apply it first, to know the checksum."""
    name: PolicyName | None = None
    """The policy that an adapter becomes a version of, beside other policies; by default it becomes the version that
    requests without a name get. Such a push pauses nothing, so that the other options of an update have no meaning."""

    @model_validator(mode="after")
    def check_options_of_adapters(self) -> Self:
        if self.kind != "adapter" and self.name is not None:
            raise ValueError(f"name={self.name} goes with kind=adapter, and the kind is {self.kind}")
        return self


class CheckpointSource(Strict):
    """Weights that the service reads itself."""

    checkpoint: str
    """The path or fsspec URL of a `.safetensors` file or of a folder of them, as the service sees it. It must lie under
    one of the checkpoint roots in the service's settings."""


class RollbackTarget(Strict):
    """Body of `POST /policy/rollback`."""

    to: Version
    """The version whose weights become current again, as a new version: numbers only go up. `GET /policy` lists the
    versions that the service knows."""
    version: Version | None = Field(default=None, ge=1)
    """The number of the new version; by default one more than the newest."""
    name: PolicyName | None = None
    """Serves the adapter of version `to` as a version of this named policy, beside the current weights, which stay. By
    default the weights become those of the policy without a name."""


class TensorLayout(Lenient):
    """Dtype and shape of one tensor."""

    dtype: str
    """The dtype under its safetensors name: `BF16`, `F32`, ..."""
    shape: list[int]
    """The size of each dimension; empty for a scalar."""


class PolicyLayout(Lenient):
    """`GET /policy/layout`: the tensors of the service's model, which full weights must have exactly, and the adapters
    that its engines take."""

    tensors: dict[str, TensorLayout]
    """Dtype and shape of each tensor, by its name in the checkpoint."""
    draft: dict[str, TensorLayout] = Field(default_factory=dict)
    """The tensors of the model that drafts (`engine.speculative_config`), by their names after `draft.`: full weights
    that are pushed as a file may have all of them beside those of the model."""
    max_lora_rank: int | None = None
    """The highest rank of an adapter that the engines take (`max_lora_rank` under `engine` in the service's config); 0
    if they take none (`enable_lora`), null if the service does not know."""


class VersionInfo(Lenient):
    """One version of the weights that the service knows."""

    version: Version
    """The number of the version."""
    kind: Literal["initial", "full", "partial", "delta", "adapter", "transfer"]
    """How the version reached the service: `initial`: the model's own checkpoint, loaded at the start; `full`,
    `partial`, `delta` and `adapter`: an upload of that kind; `transfer`: a weight transfer into the engines."""
    base: Version | None = None
    """For a delta, the version that it changed; for partial weights, the one that has the other tensors; for an
    adapter, the full weights that it is served on; null for all other kinds."""
    checksum: str | None = None
    """Sha-256 over all tensors, as `rollout_client.weights.checksum.Checksum` defines it. Null if the service has never
    held the weights, as after a transfer."""
    size_bytes: int = 0
    """Size of its full weights or its adapter as one file."""
    delta_bytes: int | None = None
    """Size of the changes since `base`, if replicas got the version as those; null for all others."""
    created_at: datetime | None = None
    """When all of the version had arrived; null if nobody knows, as of the initial one."""
    rollback_of: Version | None = None
    """The version whose weights `POST /policy/rollback` made current again under this number; null for all others."""
    source: str | None = None
    """The path or URL from which the service has read the weights; null if they were sent to it."""
    keeps_prefix_cache: bool = False
    """Whether the replicas kept what older weights had computed (`reset_prefix_cache=false`), so that tokens of this
    version may continue from it. Always false for an adapter, which shares no cache with other weights."""


class ReplicaPolicy(Lenient):
    """The weights that one generator replica has loaded."""

    replica_id: str
    """Ray Serve's id of the replica."""
    version: Version
    """The version that the replica has loaded."""
    checksum: str | None = None
    """Sha-256 over the full weights in the engine's memory, without an adapter on top; equal on all replicas that have
    loaded the same weights. Null unless `checksums_within_s` in the query of `GET /policy` has asked for it since the
    replica loaded them, and it is computed."""
    accepts_requests: bool = True
    """False of a replica that starts, until it has the current weights. If only other engines have them, because a
    trainer sent them there and they were not saved, it waits for the next version."""


class UploadState(Lenient):
    """`GET /policy/versions/{version}/upload`: how much of an unfinished upload has arrived.

    An upload that was refused because another update was under way, or because no replica could try the weights, stays:
    to try again, send its last chunk once more.
    """

    version: Version
    """The version that is being uploaded."""
    received_bytes: int
    """Number of bytes that have arrived, and the place where the next chunk begins."""
    expires_at: datetime | None = None
    """When the upload is removed unless something of it arrives before; null in the answer to a chunk."""


class NamedPolicyState(Lenient):
    """A named policy: an adapter over the full weights, served beside them."""

    name: str
    """Its name, as in `policy.name` of a request."""
    current: Version | None = None
    """The version that every replica serves; null if there is none (any more)."""
    base: Version | None = None
    """The version of the full weights that `current` is an adapter for; null without one."""
    checksum: str | None = None
    """Sha-256 over all tensors of the adapter, as in `VersionInfo`; null without one."""
    size_bytes: int = 0
    """Size of the adapter as one file."""
    created_at: datetime | None = None
    """When all of the current version had arrived."""
    next_version: Version
    """The lowest number that its next version may have: numbers go on where a policy was dropped."""
    updating_to: Version | None = None
    """The version that replicas are loading; null without one."""
    uploads: list[UploadState] = Field(default_factory=list)
    """The unfinished uploads of its versions, in their order."""


class RefusedPublication(Lenient):
    """A version of the followed folder that the service does not serve."""

    version: Version
    """Its number in the folder."""
    reason: str
    """The cause. The version is looked at again once its files have changed."""


class FollowState(Lenient):
    """The folder that the service takes versions from (`policy.follow` in its config)."""

    folder: str
    """Its path or URL."""
    taken: Version
    """The newest version that was taken from it and became current; 0 before the first one."""
    newest: Version
    """The highest number in the folder, also of a version that is not whole; 0 of an empty folder."""
    waiting: str | None = None
    """Why the service does not serve `newest`, and what it waits for; null if it serves it, or takes it now."""
    refused: list[RefusedPublication] = Field(default_factory=list)
    """The versions of the folder that were refused since the service started, in the order of their numbers, at most
    the last 16."""


class PolicyState(Lenient):
    """`GET /policy`.

    With `min_version` in the query, the answer waits until that version or a newer one is current, and is 409 after
    `wait_s`.
    """

    current: Version
    """The version that every replica serves, and that a new replica loads first."""
    versions: list[VersionInfo]
    """The versions that the service knows, oldest first."""
    replicas: list[ReplicaPolicy]
    """The weights of each generator replica."""
    updating_to: Version | None = None
    """The version that an update in progress is loading; null without an update."""
    transfer_world_size: int | None = None
    """Number of processes in a weight transfer: one of the trainer, with rank 0, and every worker of every replica."""
    next_version: Version | None = None
    """The lowest number that the next version may have; null if the service does not say."""
    uploads: list[UploadState] = Field(default_factory=list)
    """The unfinished uploads, in the order of their versions."""
    named: list[NamedPolicyState] = Field(default_factory=list)
    """The named policies that are or were served, or are being uploaded, in the order of their names."""
    follow: FollowState | None = None
    """The folder that versions are taken from; null without one."""


class ReplicaUpdate(Lenient):
    """The outcome of an update on one replica."""

    replica_id: str
    """Ray Serve's id of the replica."""
    status: Literal["swapped", "replaced"]
    """`swapped`: the replica serves the new version. `replaced`: the update failed on it, and another replica, which
    starts with the new version, takes its place."""
    error: str | None = None
    """Why the update failed on this replica; null if it did not."""
    load_s: float = 0.0
    """Seconds to fetch the weights to the replica; generations continue during that time."""
    fetched_bytes: int = 0
    """Bytes that the replica fetched from other nodes; 0 if its node could read the file, or had it already."""
    read_bytes: int = 0
    """Size of the files that the replica read for it: of what changed, where its node had the weights that a delta
    changes, else of all weights. 0 if another replica of its node did, or the node had them already."""
    swap_s: float = 0.0
    """Seconds to replace the old weights in the engine."""
    pause_s: float = 0.0
    """Seconds during which the replica generated no token."""
    canary_s: float = 0.0
    """Seconds after that in which its generations waited until it had tried the weights; 0 for all but the replica that
    tried them for all."""


class PolicyUpdate(Lenient):
    """A finished update: every replica now serves the version."""

    version: Version
    """The number of the version."""
    name: str | None = None
    """The policy that it is a version of; null for the one without a name."""
    checksum: str | None
    """Sha-256 over all tensors, as in `VersionInfo`; null after a transfer, whose weights are saved afterwards."""
    replicas: list[ReplicaUpdate]
    """The outcome on each replica."""
    canary_s: float = 0.0
    """Seconds that one replica took to try the weights, while the others generated with the old ones."""
    keeps_prefix_cache: bool = False
    """Whether the replicas kept what older weights had computed (`reset_prefix_cache=false`), so that tokens of this
    version may continue from it. Always false for an adapter, which shares no cache with other weights."""
    base: Version | None = None
    """The version of the full weights that an adapter is served on; null for all other kinds."""
    warnings: list[str] = Field(default_factory=list)
    """Doubts about the version although it is served, a sentence each: the weights change no log-probability of the
    prompts on which a replica tried them."""

    @property
    def label(self) -> str:
        """The name of the version in messages: `7`, or `run-b/7`."""
        return label_of(self.name, self.version)


class PushResult(PolicyUpdate):
    """A client's report of its push of weights: the update, and the cost of sending the weights."""

    sent_bytes: int
    """Bytes that the client sent, as compressed as they were."""
    push_s: float
    """Seconds of the whole push; of `PolicyPusher.push` including those to find what changed."""
