"""How a transfer ends: the policy store gets its weights from one replica, or all replicas load the current ones again.

One replica writes the weights while they arrive. Guarantees: a transfer neither fails nor waits because its weights
cannot be saved, the log says then who lacks them; no transfer begins before those of the last one were saved, or could
not be. Where a transfer broke off, a replica generates nothing before it has the current weights, since a part of the
new ones may be in its engine; one that cannot go back is replaced; so are all, if only the engines had the current
weights.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence

from deployments.policy.failures import PolicyFailure
from deployments.policy.replicas.commands import AbandonTransfer, CommandReport, SaveTransfer, VersionPayload
from deployments.policy.replicas.replica_registry import RegisteredReplica, ReplicaRegistry, error_of
from deployments.policy.update.activation import ReplicaInitializer
from deployments.policy.update.payloads import Payloads
from deployments.policy.update.recovery import Recovery
from deployments.policy.versions.full_weights import InitialVersion
from deployments.policy.versions.version_history import VersionHistory
from deployments.rpc.background_tasks import BackgroundTasks

ENDS_WITHIN_S = 15.0
"""After the trainer was given up, a worker takes at most so long to end what it does for it: vLLM takes up to 5 s."""
logger = logging.getLogger("rollout_service.policy")


class TransferReload:
    """Lets replicas load the current weights again after a transfer that broke off.

    Args:
        idle_s: a replica that waits for the trainer gives it up after so many seconds.
    """

    def __init__(
        self,
        registry: ReplicaRegistry,
        versions: VersionHistory,
        payloads: Payloads,
        initializer: ReplicaInitializer,
        idle_s: float,
    ) -> None:
        self._registry = registry
        self._versions = versions
        self._payloads = payloads
        self._initializer = initializer
        self._timeout_s = idle_s + ENDS_WITHIN_S

    async def reload(self, replicas: Sequence[RegisteredReplica]) -> None:
        """Returns when each of them has the current weights, or is replaced. The caller holds the update lease."""
        version = self._versions.desired.version
        try:
            payloads = await self._payloads.all_payloads()
        except (PolicyFailure, OSError) as failure:
            logger.error("The weights of version %d cannot be read.", version, exc_info=failure)
            payloads = []
        went_back = await asyncio.gather(*(self._reload(replica, payloads, version) for replica in replicas))
        extra = {"version": version}
        logger.info("%d of %d replicas are at version %d again.", sum(went_back), len(replicas), version, extra=extra)

    async def _reload(self, replica: RegisteredReplica, payloads: Sequence[VersionPayload], version: int) -> bool:
        if not payloads:
            reason = f"its transfer broke off, and only engines had the weights of version {version}"
            self._registry.replace_if_registered(replica, reason, version)
            return False
        abandoned = await self._registry.send(replica, AbandonTransfer(), timeout_s=self._timeout_s)
        if (error := error_of(abandoned)) is not None:
            self._registry.replace_if_registered(replica, error, version)
            return False
        if not await self._registry.load(replica, payloads):
            return False
        await self._initializer.restore_adapters(replica)
        return True


Layout = Mapping[str, tuple[str, Sequence[int]]]


class TransferSaving:
    """Lets a replica save what a trainer sent, and the store take it over.

    Args:
        is_on: whether anything is saved.
    """

    def __init__(
        self,
        registry: ReplicaRegistry,
        initial: InitialVersion,
        recovery: Recovery,
        tasks: BackgroundTasks,
        is_on: bool,
    ) -> None:
        self._registry = registry
        self._initial = initial
        self._recovery = recovery
        self._tasks = tasks
        self._is_on = is_on
        self._last: asyncio.Task[None] | None = None

    async def layouts(self, replicas: int) -> list[Layout | None]:
        """The layout that each replica is told to save: the first all tensors of the checkpoint, the others nothing."""
        nothing: list[Layout | None] = [None] * replicas
        if not self._is_on:
            return nothing
        try:
            layout = await self._initial.layout()
        except (OSError, ValueError) as failure:
            logger.warning("What a trainer sends is not saved: the model's checkpoint cannot be read: %s", failure)
            return nothing
        return [{name: (tensor.dtype, tensor.shape) for name, tensor in layout.tensors.items()}, *nothing[1:]]

    def start_saving(self, version: int, replica: RegisteredReplica) -> None:
        """Starts to save the version on `replica`, the first of those that took part in the transfer."""
        if self._is_on:
            self._last = self._tasks.start(self._save(version, replica))

    async def saved(self) -> None:
        """Returns when the last one has been saved, or could not be."""
        if self._last is not None:
            await asyncio.wait([self._last])

    async def _save(self, version: int, replica: RegisteredReplica) -> None:
        if (reason := await self._save_error(version, replica)) is not None:
            message = "Version %d stays in the engines alone, so that a replica that starts waits for the next: %s"
            logger.warning(message, version, reason, extra={"version": version})

    async def _save_error(self, version: int, replica: RegisteredReplica) -> str | None:
        """Lets the store get the weights; returns why it could not, if it could not."""
        report = await self._registry.send(replica, SaveTransfer(version))
        if (error := error_of(report)) is not None:
            return error
        if not isinstance(report, CommandReport) or report.saved is None:
            return "the replica saved nothing"
        has_taken = await self._recovery.take_saved(version, report.saved, replica.replica_id)
        return None if has_taken else "the policy store could not read them"
