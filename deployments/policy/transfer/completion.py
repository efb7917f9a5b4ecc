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
from deployments.policy.replicas.replica_registry import Fleet, RegisteredReplica, error_of
from deployments.policy.update.activation import AdaptersOfReplicas, VersionActivation
from deployments.policy.update.recovery import Recovery, Reseeding
from deployments.policy.versions.full_weights import InitialVersion
from deployments.policy.versions.payloads import Payloads
from deployments.policy.versions.version_history import VersionHistory
from deployments.rpc.background_tasks import BackgroundTasks

ENDS_WITHIN_S = 15.0
"""After the trainer was given up, a worker takes at most so long to end what it does for it: vLLM takes up to 5 s."""
logger = logging.getLogger("rollout_service.policy")


class TransferReload:
    """
    Args:
        idle_s: a replica that waits for the trainer gives it up after so many seconds.
    """

    def __init__(
        self,
        fleet: Fleet,
        versions: VersionHistory,
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


Layout = Mapping[str, tuple[str, Sequence[int]]]


class TransferSaving:
    """
    Args:
        activation: removes older versions once the new one is saved.
        recovery: gives what was saved to replicas that lack it.
        is_on: whether anything is saved.
    """

    def __init__(
        self,
        fleet: Fleet,
        initial: InitialVersion,
        reseeding: Reseeding,
        activation: VersionActivation,
        recovery: Recovery,
        tasks: BackgroundTasks,
        is_on: bool,
    ) -> None:
        self._fleet = fleet
        self._initial = initial
        self._reseeding = reseeding
        self._activation = activation
        self._recovery = recovery
        self._tasks = tasks
        self._is_on = is_on
        self._last: asyncio.Task[None] | None = None

    async def layouts(self, replicas: int) -> list[Layout | None]:
        """What each of the replicas is told to save: the first all tensors of the checkpoint, the others nothing."""
        nothing: list[Layout | None] = [None] * replicas
        if not self._is_on:
            return nothing
        try:
            layout = await self._initial.layout()
        except (OSError, ValueError) as failure:
            logger.warning("What a trainer sends is not saved: the model's checkpoint cannot be read: %s", failure)
            return nothing
        return [{name: (tensor.dtype, tensor.shape) for name, tensor in layout.tensors.items()}, *nothing[1:]]

    def begin(self, version: int, replica: RegisteredReplica) -> None:
        """Args: `replica` is the first of those that took part in the transfer."""
        if self._is_on:
            self._last = self._tasks.start(self._save(version, replica))

    async def ended(self) -> None:
        """Returns when the last one has been saved, or could not be."""
        if self._last is not None:
            await asyncio.wait([self._last])

    async def _save(self, version: int, replica: RegisteredReplica) -> None:
        reason = await self._reason_not_to(version, replica)
        if reason is None:
            self._activation.remove_old_versions()
            # Not a part of what the next transfer waits for: it holds the update lease then.
            self._tasks.start(self._recovery.give_saved())
        else:
            message = "Version %d stays in the engines alone, so that a replica that starts waits for the next: %s"
            logger.warning(message, version, reason, extra={"version": version})

    async def _reason_not_to(self, version: int, replica: RegisteredReplica) -> str | None:
        """Lets the store get the weights; returns why it could not, if it could not."""
        report = await self._fleet.send(replica, SaveTransfer(version))
        if (error := error_of(report)) is not None:
            return error
        if not isinstance(report, CommandReport) or report.saved is None:
            return "the replica saved nothing"
        has_taken = await self._reseeding.take(version, report.saved, replica.replica_id)
        return None if has_taken else "the policy store could not read them"
