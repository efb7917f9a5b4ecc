"""What an ingress replica knows of the policy: which version is current, and how to wait for one."""

import asyncio

from deployments.failures import PolicyStoreLost
from deployments.policy.store_client import PolicyStoreClient
from rollout_client.contract import PolicyDemand

ASK_AGAIN_AFTER_S = 0.5


class RemotePolicy:
    """Follows the store, so that a rollout whose demand is met already costs no call."""

    def __init__(self, store: PolicyStoreClient) -> None:
        self.store = store
        self.version: int | None = None
        """As far as this replica has heard; `None` until it has heard anything."""
        self._following: asyncio.Task[None] | None = None

    def follow(self) -> None:
        """Hears of new versions from now on, for the life of this replica."""
        self._following = asyncio.create_task(self._follow())

    async def wait_for_version(self, demand: PolicyDemand) -> None:
        """Returns once the weights are current that `demand` asks for.

        Raises:
            PolicyNotCurrent: they are not, and do not become so in time.
            PolicyStoreLost: nobody can say.
        """
        if demand.min_version is None and demand.version is None:
            return
        min_version = demand.min_version or 0
        # A version that was reached stays reached, but whether it is still the current one only the store can say.
        is_met = demand.version is None and self.version is not None and self.version >= min_version
        if not is_met:
            self.version = await self.store.wait_for(min_version, demand.version, demand.wait_s)

    async def _follow(self) -> None:
        while True:
            try:
                self.version = await self.store.watch(self.version)
            except PolicyStoreLost:
                await asyncio.sleep(ASK_AGAIN_AFTER_S)
