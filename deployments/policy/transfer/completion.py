"""The weights that a trainer sent to the engines, for the policy store too: one replica writes them while they arrive.

Guarantees: a transfer neither fails nor waits because its weights cannot be saved, the log says then who lacks them; no
transfer begins before those of the last one were saved, or could not be.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence

from deployments.policy.recovery.reseeding import Reseeding
from deployments.policy.replicas.commands import CommandReport, SaveTransfer
from deployments.policy.replicas.fleet import Fleet, error_of
from deployments.policy.replicas.replica_registry import RegisteredReplica
from deployments.policy.update.recovery import Recovery
from deployments.policy.updates.activation import VersionActivation
from deployments.policy.versions.initial_version import InitialVersion
from deployments.rpc.background_tasks import BackgroundTasks

Layout = Mapping[str, tuple[str, Sequence[int]]]
logger = logging.getLogger("rollout_service.policy")


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
