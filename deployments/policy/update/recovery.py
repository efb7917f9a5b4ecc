"""What becomes of a replica that registers: it loads what it lacks, or the store takes over what the replica has.

A store whose folder was lost, or is older than what replicas serve, does not take them back. `standing.py` has the
states. Guarantees: numbers only go up; a number never means two things; a version that a replica serves is current, on
disk, before any other replica loads it; while a store with an empty folder waits for replicas of its predecessor
(`settle_s`), no replica that lacks their version accepts requests, and no version is pushed.
"""

import asyncio
import logging

from deployments.policy.recovery.reseeding import Reseeding
from deployments.policy.recovery.standing import Standing, Verdict, held_versions, standing_of
from deployments.policy.replicas.fleet import Fleet
from deployments.policy.replicas.replica_registry import RegisteredReplica
from deployments.policy.update.activation import ReplicaInitializer
from deployments.policy.update.update_lock import UpdateLock
from deployments.policy.updates.activation import VersionActivation
from deployments.policy.versions.version_history import PolicyVersions
from deployments.rpc.background_tasks import BackgroundTasks

SETTLE_S = 5.0
"""Replicas register again half a second after they have lost the store. Engines take longer than this to start, so a
service that starts for the first time loses no time."""
logger = logging.getLogger("rollout_service.policy")


class Recovery:
    """
    Args:
        settle_s: how long a store with an empty folder waits for replicas that are ahead of it.
    """

    def __init__(
        self,
        fleet: Fleet,
        versions: PolicyVersions,
        activation: VersionActivation,
        initializer: ReplicaInitializer,
        update_lock: UpdateLock,
        reseeding: Reseeding,
        tasks: BackgroundTasks,
        settle_s: float,
    ) -> None:
        self._fleet = fleet
        self._versions = versions
        self._activation = activation
        self._initializer = initializer
        self._update_lock = update_lock
        self._reseeding = reseeding
        self._tasks = tasks
        self._settled = asyncio.Event()
        if settle_s > 0 and not versions.has_any:
            asyncio.get_running_loop().call_later(settle_s, self._settled.set)
        else:
            self._settled.set()

    async def settled(self) -> None:
        """Returns once it is known whether replicas are ahead of a store that has started with an empty folder."""
        await self._settled.wait()

    async def admit(self, replica: RegisteredReplica) -> None:
        """Gives the replica what it lacks, takes over what it has, or replaces it.

        Where the store cannot write what it takes over, the replica has to register again.
        """
        try:
            is_admitted = await self._is_admitted(replica)
        except OSError as error:
            extra = {"replica_id": replica.replica_id}
            logger.error("The versions of a replica cannot be taken over.", exc_info=error, extra=extra)
            self._fleet.registry.forget(replica.replica_id, str(error))
            return
        if is_admitted:
            await self._initializer.initialize(replica)

    async def _is_admitted(self, replica: RegisteredReplica) -> bool:
        verdict = self._verdict_on(replica)
        if verdict.standing is Standing.AHEAD:
            async with self._update_lock.lease("the versions of a replica that is ahead are being taken over"):
                verdict = self._verdict_on(replica)
                if verdict.standing is Standing.AHEAD:
                    await self._take_over(replica)
        elif verdict.standing is Standing.KNOWN:
            await self._settled.wait()
        if verdict.standing is Standing.DIFFERENT:
            extra = {"replica_id": replica.replica_id}
            logger.error("A generator replica has to be replaced: %s.", verdict.reason, extra=extra)
            self._fleet.replace_if_registered(replica, verdict.reason)
            return False
        if verdict.standing is Standing.TRIED:
            self._versions.keep_tried(replica.loaded.version)
        if self._lacks_weights_of(replica):
            self._tasks.start(self._reseed())
        return True

    def _verdict_on(self, replica: RegisteredReplica) -> Verdict:
        return standing_of(replica.registration, self._versions.known())

    async def _take_over(self, replica: RegisteredReplica) -> None:
        """The caller holds the update lease."""
        newest = replica.loaded.version
        extra = {"replica_id": replica.replica_id, "version": newest}
        logger.warning(
            "Version %d of a replica is newer than what the policy store has: the store goes on with it.",
            newest,
            extra=extra,
        )
        await asyncio.to_thread(self._versions.take_over, held_versions(replica.registration))
        await self._activation.activate()
        self._settled.set()

    def _lacks_weights_of(self, replica: RegisteredReplica) -> bool:
        return replica.loaded == self._versions.desired and not self._versions.has_desired

    async def give_saved(self) -> None:
        """Gives weights that the store has got meanwhile to the replicas that lack them."""
        async with self._update_lock.lease():
            if self._versions.has_desired:
                await self._reseed()

    async def _reseed(self) -> None:
        """Reads lost weights back, and gives them to the replicas that lack them; where that fails, replicas that serve
        an older version are replaced, and their successors wait for the next one."""
        has_weights = await self._reseeding.reseed()
        desired = self._versions.desired
        for other in self._fleet.registry.replicas:
            if other.loaded == desired:
                continue
            if has_weights and not other.is_starting:
                other.is_starting = True
                self._tasks.start(self._initializer.initialize(other))
            elif not has_weights and other.loaded.version:
                reason = f"it serves an older version than {desired.version}, whose weights only other replicas have"
                self._fleet.replace_if_registered(other, reason, desired.version)
