"""The current weight version as one ingress replica knows it. Server half: `deployments/policy/store.py`."""

import asyncio
import logging
from collections.abc import Callable

from deployments.failures import PolicyStoreLost
from deployments.policy.store_client import PolicyStoreClient
from rollout_client.contract import PolicyDemand
from service.rollouts.staleness import VersionFeed

logger = logging.getLogger("rollout_service.remote")

RETRY_WATCH_AFTER_S = 0.5


class RemotePolicy(VersionFeed):
    """Follows the current version, so that a rollout whose demand is already met makes no call."""

    def __init__(self, store: PolicyStoreClient) -> None:
        self.store = store
        self._version: int | None = None
        self._subscribers: dict[object, Callable[[int], None]] = {}
        self._following: asyncio.Task[None] | None = None

    @property
    def version(self) -> int | None:
        """The current version as this replica knows it; `None` until the store has told one."""
        return self._version

    @version.setter
    def version(self, version: int | None) -> None:
        if version is None or version == self._version:
            return
        self._version = version
        for on_version in tuple(self._subscribers.values()):
            on_version(version)

    def subscribe(self, on_version: Callable[[int], None]) -> Callable[[], None]:
        subscription = object()
        self._subscribers[subscription] = on_version
        if self._version is not None:
            on_version(self._version)

        def unsubscribe() -> None:
            self._subscribers.pop(subscription, None)

        return unsubscribe

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

    async def learn_version(self) -> None:
        """Returns when the current version is known. Raises `PolicyStoreLost` if the policy store does not answer."""
        if self.version is None:
            self.version = await self.store.wait_for(0, None, None)

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
