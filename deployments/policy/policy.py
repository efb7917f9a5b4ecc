"""One policy of the store: its versions and uploads on disk, and which version is current.

The policy without a name has full weights, and perhaps an adapter for them. A named policy has adapters alone, which
are served beside the full weights:

    names/run-b/current.json       the newest version that was served; the policy may have been dropped since
    names/run-b/versions/7/        as in `VersionStore`
    names/run-b/uploads/           as in `UploadStore`

Guarantee: the versions of a policy are numbered upward for ever, also where it was dropped in between. A policy knows
no replicas; `update.two_phase_update.Updater` changes which version is current.
"""

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deployments.policy.uploads.upload_store import UploadStore
from deployments.policy.uploads.uploads import ActivePushes, Uploads
from deployments.policy.versions.current_version import CurrentVersion
from deployments.policy.versions.full_weights import InitialVersion
from deployments.policy.versions.housekeeping import Housekeeping
from deployments.policy.versions.version_history import VersionHistory
from deployments.policy.versions.version_store import StoredVersion, VersionStore
from deployments.rpc.background_tasks import BackgroundTasks
from rollout_client.contract.base import label_of
from rollout_client.contract.policy import NamedPolicyState, PolicyUpdate

if TYPE_CHECKING:
    from deployments.policy.settings import PolicySettings


class Policy:
    """The policy as it is on disk, where a store that died may have left half-made files.

    Args:
        name: `None` for the policy without a name.
        root: the store's folder.
        run: the training run that makes new versions.
        initial: version 0 of the policy without a name.
    """

    def __init__(
        self,
        name: str | None,
        root: Path,
        settings: "PolicySettings",
        run: str,
        initial: InitialVersion,
        tasks: BackgroundTasks,
        housekeeping: Housekeeping,
    ) -> None:
        folder = root if name is None else root / "names" / name
        self.name = name
        self.version_store = VersionStore(folder, root)
        self.upload_store = UploadStore(folder, settings.upload_expiry_s, root)
        if folder.is_dir():
            self.version_store.remove_unfinished()
            self.upload_store.remove_unfinished(self.version_store.current())
        self.current = CurrentVersion(self.version_store.current(), settings.wait_s)
        self.versions = VersionHistory(self.version_store, initial, self.current, settings.max_version_step, run)
        self.pushes = ActivePushes(tasks)
        self.uploads = Uploads(
            self.upload_store, self.versions, initial, self.pushes, housekeeping, settings.upload_quota_bytes
        )
        self.numbering = asyncio.Lock()
        """Held while a number is chosen for a push, until its end."""
        self.last_update: PolicyUpdate | None = None
        self.served = self.version_store.find(self.current.number)
        """The version that new generations use; `None` of a policy that was dropped, and of version 0."""
        self._keep_versions = settings.keep_versions

    @property
    def is_known(self) -> bool:
        """Whether anybody has ever begun to push it."""
        return bool(self.current.number or self.upload_store.states())

    def label(self, version: int) -> str:
        return label_of(self.name, version)

    def log_extra(self, version: int) -> dict[str, Any]:
        return {"version": version if self.name is None else self.label(version)}

    def next_number(self) -> int:
        """The lowest number that the next version may have: above that of every push under way, too."""
        return max([self.versions.next_number(), *(version + 1 for version in self.pushes)])

    async def publish(self) -> int:
        """Serves the version that is current on disk from now on, and returns its number."""
        number = await self.versions.publish()
        self.served = self.version_store.find(number)
        self.uploads.drop_up_to(number)
        return number

    def remove_old_versions(self, needed: Iterable[int]) -> None:
        """Removes all but the newest versions with full weights, and those that are `needed`; named: all but one."""
        if self.name is None:
            self.versions.keep_newest(self._keep_versions, needed)
        else:
            self.version_store.keep_only([self.current.number])

    def drop(self) -> None:
        """Removes all versions. The number of the last one stays known."""
        self.version_store.keep_only(())
        self.served = None

    def weights_of(self, info: StoredVersion) -> Path:
        return self.version_store.weights(info.version)

    def state(self) -> NamedPolicyState:
        """The state of a named policy."""
        served = self.served
        return NamedPolicyState(
            name=str(self.name),
            current=None if served is None else served.version,
            base=None if served is None else served.base,
            checksum=None if served is None else served.checksum,
            size_bytes=0 if served is None else served.size_bytes,
            created_at=None if served is None else served.created_at,
            next_version=self.next_number(),
            updating_to=self.versions.updating_to,
            uploads=self.upload_store.states(),
        )
