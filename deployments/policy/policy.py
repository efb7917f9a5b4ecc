"""One named policy: adapters that are served beside the full weights, and their versions on disk.

    names/run-b/current.json       the newest version that was served; the policy may have been dropped since
    names/run-b/versions/7/        as in `VersionStore`
    names/run-b/uploads/           as in `UploadStore`

Guarantees: its versions are numbered upward for ever, also where the policy was dropped in between; the version that
replicas serve is on disk before any rollout uses it.
"""

from dataclasses import dataclass, field
from pathlib import Path

from deployments.policy.replicas.commands import VersionPayload
from deployments.policy.uploads.pushes import Pushes
from deployments.policy.uploads.upload_store import UploadStore
from deployments.policy.uploads.uploads import Uploads
from deployments.policy.versions.current_version import CurrentVersion
from deployments.policy.versions.payloads import stored_file
from deployments.policy.versions.version_history import PolicyVersions
from deployments.policy.versions.version_store import StoredVersion, VersionStore
from rollout_client.policy_contract import NamedPolicyState


@dataclass(slots=True, eq=False)
class NamedPolicy:
    name: str
    version_store: VersionStore
    upload_store: UploadStore
    current: CurrentVersion
    versions: PolicyVersions
    uploads: Uploads
    pushes: Pushes
    served: StoredVersion | None = field(init=False)
    """The version that new generations use; `None` if there is none."""

    def __post_init__(self) -> None:
        self.served = self.versions.stored(self.current.number)

    @property
    def is_known(self) -> bool:
        """Whether anybody has ever begun to push it."""
        return bool(self.current.number or self.upload_store.states())

    async def publish(self) -> None:
        """The version that is current on disk is served from now on, and older ones are removed."""
        number = await self.versions.publish()
        self.version_store.keep_only([number])
        self.uploads.drop_up_to(number)
        self.served = self.versions.stored(number)

    def drop(self) -> None:
        """It has no version any more. The number of the last one stays known."""
        self.version_store.keep_only(())
        self.served = None

    def weights_of(self, info: StoredVersion) -> Path:
        return self.version_store.weights(info.version)

    def payload(self, info: StoredVersion, node_id: str, is_copied: bool) -> VersionPayload:
        """Of one of its versions, for replicas. Args: as in `StoredFile`."""
        return VersionPayload(
            version=info.version,
            kind="adapter",
            size_bytes=info.size_bytes,
            checksum=str(info.checksum),
            file=stored_file(self.weights_of(info), node_id, is_copied),
            adapter_config=info.adapter_config,
            name=self.name,
            base=info.base,
        )

    def state(self) -> NamedPolicyState:
        served = self.served
        return NamedPolicyState(
            name=self.name,
            current=None if served is None else served.version,
            base=None if served is None else served.base,
            checksum=None if served is None else served.checksum,
            size_bytes=0 if served is None else served.size_bytes,
            created_at=None if served is None else served.created_at,
            next_version=self.pushes.next_number(),
            updating_to=self.versions.updating_to,
            uploads=self.uploads.states(),
        )
