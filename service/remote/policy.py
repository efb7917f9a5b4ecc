"""The current weight version as one ingress replica knows it. Server half: `deployments/policy/store.py`."""

import asyncio
import logging

from deployments.failures import PolicyStoreLost
from deployments.policy.store_client import PolicyStoreClient
from rollout_client.contract import PolicyDemand

logger = logging.getLogger("rollout_service.remote")

RETRY_WATCH_AFTER_S = 0.5


class RemotePolicy:
    """Follows the current version, so that a rollout whose demand is already met makes no call."""

    def __init__(self, store: PolicyStoreClient) -> None:
        self.store = store
        self.version: int | None = None
        """The current version as this replica knows it; `None` until the store has told one."""
        self._following: asyncio.Task[None] | None = None

    def follow(self) -> None:
        """Watches the store for new versions from now on, for the life of this replica."""
        self._following = asyncio.create_task(self._follow())

    async def wait_for_version(self, demand: PolicyDemand) -> None:
        """Returns when the weights that `demand` names are current.

        Raises:
            PolicyNotCurrent: they are not, and do not become current within `demand.wait_s` seconds.
            PolicyStoreLost: the policy store does not answer.
        """
        if demand.min_version is None and demand.version is None:
            return
        min_version = demand.min_version or 0
        # Versions only increase, so a known version proves a minimum. Which one is current, only the store can tell.
        is_met = demand.version is None and self.version is not None and self.version >= min_version
        if not is_met:
            self.version = await self.store.wait_for(min_version, demand.version, demand.wait_s)

    async def _follow(self) -> None:
        is_lost = False
        while True:
            try:
                self.version = await self.store.watch(self.version)
                is_lost = False
            except PolicyStoreLost as lost:
                if not is_lost:
                    logger.warning("The policy store cannot be watched, retrying: %s", lost, exc_info=lost)
                is_lost = True
                await asyncio.sleep(RETRY_WATCH_AFTER_S)
