"""Replicas whose transfer broke off load the current weights again, in place.

Guarantees: a replica generates nothing in between, since a part of the new weights may be in its engine; one that
cannot go back is replaced; so are all, if only the engines had the current weights.
"""

import asyncio
import logging
from collections.abc import Sequence

from deployments.policy.failures import PolicyFailure
from deployments.policy.replicas.commands import AbandonTransfer, VersionPayload
from deployments.policy.replicas.fleet import Fleet, error_of
from deployments.policy.replicas.replica_registry import RegisteredReplica
from deployments.policy.updates.adapters_of_replicas import AdaptersOfReplicas
from deployments.policy.versions.payloads import Payloads
from deployments.policy.versions.version_history import PolicyVersions

ENDS_WITHIN_S = 15.0
"""After the trainer was given up, a worker takes at most so long to end what it does for it: vLLM takes up to 5 s."""
logger = logging.getLogger("rollout_service.policy")


class GoingBack:
    """
    Args:
        idle_s: a replica that waits for the trainer gives it up after so many seconds.
    """

    def __init__(
        self,
        fleet: Fleet,
        versions: PolicyVersions,
        payloads: Payloads,
        idle_s: float,
        adapters: AdaptersOfReplicas,
    ) -> None:
        self._fleet = fleet
        self._versions = versions
        self._payloads = payloads
        self._timeout_s = idle_s + ENDS_WITHIN_S
        self._adapters = adapters

    async def go_back(self, replicas: Sequence[RegisteredReplica]) -> None:
        """Returns when each of them has the current weights, or is replaced. The caller holds the update lease."""
        version = self._versions.desired.version
        try:
            payloads = await self._payloads.complete()
        except (PolicyFailure, OSError) as failure:
            logger.error("The weights of version %d cannot be read.", version, exc_info=failure)
            payloads = []
        went_back = await asyncio.gather(*(self._take_back(replica, payloads, version) for replica in replicas))
        extra = {"version": version}
        logger.info("%d of %d replicas are at version %d again.", sum(went_back), len(replicas), version, extra=extra)

    async def _take_back(self, replica: RegisteredReplica, payloads: Sequence[VersionPayload], version: int) -> bool:
        if not payloads:
            reason = f"its transfer broke off, and only engines had the weights of version {version}"
            self._fleet.replace_if_registered(replica, reason, version)
            return False
        abandoned = await self._fleet.send(replica, AbandonTransfer(), timeout_s=self._timeout_s)
        if (error := error_of(abandoned)) is not None:
            self._fleet.replace_if_registered(replica, error, version)
            return False
        if not await self._fleet.load(replica, payloads):
            return False
        if self._adapters.are_needed_by(replica):
            await self._adapters.give([replica])
        return True
