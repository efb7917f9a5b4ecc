"""What follows once a version is current on disk and the replicas have loaded it."""

import logging
from collections.abc import Awaitable, Callable

from deployments.policy.update.activation import ReplicaInitializer
from deployments.policy.updates.chain_compaction import ChainCompaction
from deployments.policy.uploads.uploads import Uploads
from deployments.policy.versions.housekeeping import Housekeeping
from deployments.policy.versions.payloads import Payloads
from deployments.policy.versions.version_history import PolicyVersions

logger = logging.getLogger("rollout_service.policy")


class VersionActivation:
    """
    Args:
        keep_versions: how many full versions stay on disk.
        on_base: is told, after each change, that other full weights may be current.
    """

    def __init__(
        self,
        versions: PolicyVersions,
        uploads: Uploads,
        initializer: ReplicaInitializer,
        payloads: Payloads,
        housekeeping: Housekeeping,
        compaction: ChainCompaction,
        keep_versions: int,
        on_base: Callable[[], Awaitable[None]],
    ) -> None:
        self._versions = versions
        self._uploads = uploads
        self._initializer = initializer
        self._payloads = payloads
        self._housekeeping = housekeeping
        self._compaction = compaction
        self._keep_versions = keep_versions
        self._on_base = on_base

    async def activate(self) -> None:
        """Publishes the version, removes what it makes useless, and lets replicas that waited for it accept requests.

        The caller holds the update lease.
        """
        current = await self._versions.publish()
        logger.info("Version %d is current.", current, extra={"version": current})
        await self._on_base()
        self._uploads.drop_up_to(current)
        self.remove_old_versions()
        await self._initializer.start_accepting()
        self._compaction.start_if_due(then=self.remove_old_versions)

    def remove_old_versions(self) -> None:
        """All but the newest with weights, and those that are needed."""
        self._versions.keep_newest(self._keep_versions, self._payloads.needed)
        self._housekeeping.wake()
