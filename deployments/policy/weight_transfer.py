"""Weights that a trainer on the same fabric sends straight into the engines, by vLLM's weight-transfer engines.

The trainer's side expects one engine; here it is connected to all replicas. The trainer is rank 0, and each worker of
each replica has a rank of its own. In functions of ranks, `workers` are the numbers of workers of the replicas, in the
order in which they registered.

Guarantees: a transfer reaches every replica that has started, or it is refused and has to begin with `init` again; one
that fails or is abandoned midway leaves no replica with a part of the weights, since all of them load the current ones
(`ReplicaLoading.go_back`); the update lease is held from `start` until the transfer is finished or they have them;
replicas connect only to trainers that the config lists.

One replica writes the weights to a file while they arrive, and the store reads it afterwards. Guarantees: a transfer
neither fails nor waits because its weights cannot be saved, the log says then who lacks them; no transfer begins before
those of the last one were saved, or could not be; a file becomes a version's weights only if it has the checksum that
its replica computed.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from deployments.policy.cluster import Cluster
from deployments.policy.commands import (
    ApplyTransfer,
    Command,
    CommandReport,
    FinishTransfer,
    InitTransfer,
    SaveTransfer,
    StartTransfer,
    SwapOptions,
    UpdateTransfer,
)
from deployments.policy.failures import TransferRefused, VersionUnknown
from deployments.policy.node_files import WeightsNotFetched, fetch_file
from deployments.policy.policies import Policy
from deployments.policy.replica_loading import ReplicaLoading
from deployments.policy.replica_registry import CommandResult, RegisteredReplica, ReplicaRegistry, error_of
from deployments.policy.trusted_trainers import TrustedTrainers
from deployments.policy.update import Updates
from deployments.policy.versions import Version
from deployments.rpc.background_tasks import BackgroundTasks
from rollout_client.contract.policy import PolicyUpdate, SwitchOptions
from rollout_client.weights.safetensors_file import header_bytes, header_of

if TYPE_CHECKING:
    from deployments.policy.settings import PolicySettings

TRAINER_RANKS = 1
ENDS_WITHIN_S = 15.0
"""After the trainer was given up, a worker takes at most so long to end what it does for it: vLLM takes up to 5 s."""
UpdateInfo = dict[str, Any] | list[dict[str, Any]]


def world_size(workers: Sequence[int]) -> int:
    """How many processes take part."""
    return TRAINER_RANKS + sum(workers)


def shares(update_info: UpdateInfo, workers: Sequence[int]) -> list[UpdateInfo]:
    """The update info for each replica: all the same, or, of a list with one entry for each worker, those of its own.

    Raises:
        TransferRefused: the list does not have one entry for each worker.
    """
    if not isinstance(update_info, list):
        return [update_info] * len(workers)
    if len(update_info) != sum(workers):
        raise TransferRefused.of("update_info", f"{sum(workers)} workers take part, one entry each", len(update_info))
    return [update_info[end - count : end] for end, count in zip(accumulate(workers), workers, strict=True)]


def _refuse_wrong_world_size(init_info: Mapping[str, Any], workers: Sequence[int]) -> None:
    """Raises `TransferRefused` if there is no replica, or the trainer expects another number of processes."""
    if not workers:
        raise TransferRefused.of("transfer", "no replica is there yet; wait until the service is ready")
    expected = world_size(workers)
    if init_info.get("world_size") != expected:
        message = f"{expected} processes take part: the trainer's one and {expected - 1} of the replicas"
        raise TransferRefused.of("init_info.world_size", message, init_info.get("world_size"))


logger = logging.getLogger("rollout_service.policy")
REPLICAS_CHANGED = "the replicas have changed since the trainer was connected; call /init_weight_transfer_engine again"
SENDING = "a trainer is sending weights to the replicas"
NOT_UNDER_WAY = "none is under way; start it first, or it was abandoned"


class _ReplicaFailed(Exception):
    """A replica failed a step of a transfer; the message is its error."""


class WeightTransfer:
    """Connects the replicas to a trainer, and takes them through the steps of a transfer.

    Args:
        policy: the one without a name.
        cluster: reads the file of a replica.
    """

    def __init__(
        self,
        settings: "PolicySettings",
        registry: ReplicaRegistry,
        policy: Policy,
        updates: Updates,
        loading: ReplicaLoading,
        tasks: BackgroundTasks,
        cluster: Cluster,
    ) -> None:
        self._registry = registry
        self._policy = policy
        self._versions = policy.versions
        self._updates = updates
        self._update_lock = registry.update_lock
        self._trainers = TrustedTrainers(settings.transfer.trainers)
        self._loading = loading
        self._tasks = tasks
        self._cluster = cluster
        self._rendezvous_timeout_s = settings.transfer.rendezvous_timeout_s
        self._idle_s = settings.transfer_idle_s
        self._participants: list[RegisteredReplica] = []
        """The replicas that are connected to the trainer, in the order of their ranks."""
        self._lease: AsyncExitStack | None = None
        """The update lease of the transfer that is under way."""
        self._stepping = asyncio.Lock()
        self._silence: asyncio.TimerHandle | None = None
        """Abandons the transfer that is under way if no step follows."""
        self._keeps_prefix_cache = False
        """Whether the transfer that is under way keeps the prefix cache."""
        self._saving: asyncio.Task[None] | None = None
        """Saves the weights of the last transfer."""

    @property
    def is_under_way(self) -> bool:
        """Whether one has paused the replicas, which may be going back from it."""
        return self._update_lock.activity == SENDING

    async def init(self, init_info: dict[str, Any]) -> int:
        """Connects every replica to the trainer; returns how many processes take part, including the trainer's one.

        Generations go on. A trainer that does not answer holds up other updates for `rendezvous_timeout_s` seconds.

        Raises:
            TrainerNotTrusted: the config does not list this one, or none.
            TransferRefused: no replica is registered, the world size is wrong, or a replica failed.
        """
        init_info = await self._trainers.checked(init_info)
        async with self._update_lock.lease():
            await self._registry.drop_dead()
            replicas = self._registry.started
            workers = _workers_of(replicas)
            _refuse_wrong_world_size(init_info, workers)
            self._participants = []
            timeout_s = self._rendezvous_timeout_s
            first_ranks = accumulate(workers[:-1], initial=TRAINER_RANKS)
            commands = [InitTransfer({**init_info, "rank_offset": rank}, timeout_s) for rank in first_ranks]
            # Waits for all of them even if one has failed: a replica that still waits for this trainer must not meet
            # the next one.
            results = await asyncio.gather(*map(self._registry.send, replicas, commands))
            if errors := _errors_in(results):
                logger.warning("A replica could not meet the trainer of a weight transfer: %s", errors[0])
                raise TransferRefused.of("init_info", f"a replica could not meet the trainer: {errors[0]}")
            self._participants = replicas
            return world_size(workers)

    async def start(self, options: SwitchOptions) -> None:
        """Waits for the update lease, then pauses every replica for the weights to come.

        Raises:
            UpdateUnderWay: an update holds the lease, and the caller does not wait.
            TransferRefused: the trainer is connected with other replicas than are registered now, or a replica failed.
        """
        self._update_lock.refuse_if_busy(options)
        async with AsyncExitStack() as lease:
            await lease.enter_async_context(self._update_lock.lease(SENDING))
            if self._saving is not None:
                await asyncio.wait([self._saving])
            await self._registry.drop_dead()
            if not self._participants or self._participants != self._registry.started:
                raise TransferRefused.of("transfer", REPLICAS_CHANGED)
            self._lease = lease.pop_all()
        async with self._step():
            self._keeps_prefix_cache = not options.reset_prefix_cache
            start = StartTransfer(SwapOptions(options.mode, options.reset_prefix_cache))
            saves = replace(start, header=await asyncio.to_thread(self._header_to_save))
            await self._send_all([saves, *[start] * (len(self._participants) - 1)])

    async def update(self, update_info: UpdateInfo) -> None:
        """Lets every replica receive what the trainer sends meanwhile.

        Raises:
            TransferRefused: no transfer is under way, or a replica failed.
        """
        if self._lease is None:
            raise TransferRefused.of("transfer", NOT_UNDER_WAY)
        of_each = shares(update_info, _workers_of(self._participants))
        async with self._step():
            await self._send_all([UpdateTransfer(share, self._idle_s) for share in of_each])

    async def finish(self, version: int | None) -> PolicyUpdate:
        """Makes what was sent the current version, by default the next number.

        The version is made if at least one replica holds it; the others are replaced.

        Raises:
            VersionRefused: the number is taken; the transfer goes on.
            TransferRefused: no transfer is under way, or no replica could apply the weights.
        """
        number = self._versions.newest + 1 if version is None else version
        self._versions.refuse_taken(number)
        async with self._step() as lease:
            applied = await self._apply(number)
            self._lease = None
        async with lease:
            return await self._resume(number, applied)

    @asynccontextmanager
    async def _step(self) -> AsyncIterator[AsyncExitStack]:
        """Takes a step after those before it; if it fails, or none follows, the replicas go back.

        Raises:
            TransferRefused: no transfer is under way, or a replica failed.
        """
        async with self._stepping:
            if self._lease is None:
                raise TransferRefused.of("transfer", NOT_UNDER_WAY)
            if self._silence is not None:
                self._silence.cancel()
            try:
                yield self._lease
            except _ReplicaFailed as failure:
                self._abandon(str(failure))
                message = f"it broke, and the replicas go back to the weights before it: {failure}"
                raise TransferRefused.of("transfer", message) from failure
            except Exception as error:
                self._abandon(f"{type(error).__name__}: {error}")
                raise
            if self._lease is not None:
                loop, reason = asyncio.get_running_loop(), "nothing was heard from the trainer"
                self._silence = loop.call_later(self._idle_s, self._abandon, reason)

    def _abandon(self, reason: str) -> None:
        """Ends the transfer that is under way; the lease is held until its replicas have gone back."""
        logger.warning("A weight transfer is abandoned, and its replicas go back: %s", reason)
        lease, self._lease = self._lease, None
        replicas, self._participants = self._participants, []
        if lease is not None:
            self._tasks.start(self._go_back(lease, replicas))

    async def _go_back(self, lease: AsyncExitStack, replicas: Sequence[RegisteredReplica]) -> None:
        timeout_s = self._idle_s + ENDS_WITHIN_S
        async with lease:
            back = await asyncio.gather(*(self._loading.go_back(each, None, timeout_s) for each in replicas))
        version = self._versions.desired.version
        extra = {"version": version}
        logger.info("%d of %d replicas are at version %d again.", sum(back), len(replicas), version, extra=extra)

    async def _apply(self, version: int) -> dict[RegisteredReplica, CommandResult]:
        """Lets every replica apply what it received, and makes the version current on disk if one of them could."""
        results = await self._registry.send_all(self._participants, ApplyTransfer())
        if len(errors := _errors_in(results.values())) == len(results):
            raise _ReplicaFailed(errors[0])
        self._versions.make_current(
            Version(
                version=version,
                kind="transfer",
                created_at=datetime.now(UTC),
                stored="nothing",
                keeps_prefix_cache=self._keeps_prefix_cache,
            )
        )
        return results

    async def _resume(self, version: int, applied: dict[RegisteredReplica, CommandResult]) -> PolicyUpdate:
        ready = [replica for replica, result in applied.items() if error_of(result) is None]
        info = self._versions.info(version)
        finished = await self._registry.send_all(ready, FinishTransfer(version, info.key))
        replicas = [self._registry.outcome(each, result, version) for each, result in (applied | finished).items()]
        await self._updates.activate(self._policy)
        self._saving = self._tasks.start(self._save(version, self._participants[0]))
        return self._policy.update_to(info, replicas)

    def _header_to_save(self) -> bytes | None:
        """The beginning of a file with all tensors of the checkpoint; `None` if that cannot be read."""
        try:
            tensors = self._versions.initial.layout.tensors
            header = header_of((name, tensor.dtype, tensor.shape) for name, tensor in tensors.items())
        except (OSError, ValueError) as failure:
            logger.warning("What a trainer sends is not saved: the model's checkpoint cannot be read: %s", failure)
            return None
        return header_bytes(header.entries)

    async def _save(self, version: int, saver: RegisteredReplica) -> None:
        """Stores the weights that the replica has written, and lets replicas that waited for them load them."""
        try:
            report = await self._registry.send(saver, SaveTransfer(version))
            saved = report.saved if isinstance(report, CommandReport) else None
            if saved is None:
                raise WeightsNotFetched(error_of(report) or "the replica saved nothing")
            with self._versions.workspace(version) as folder:
                file = folder / "saved.safetensors"
                await fetch_file(saved, partial(self._cluster.read, saved.file), file)
                described = {"checksum": saved.checksum, "size_bytes": saved.size_bytes}
                info = self._versions.info(version).model_copy(update=described)
                await asyncio.to_thread(self._versions.add_weights, info, file)
        except (WeightsNotFetched, VersionUnknown, OSError) as failure:
            message = "Version %d stays in the engines alone, so that a replica that starts waits for the next: %s"
            logger.warning(message, version, failure, extra={"version": version})
            return
        self._updates.remove_old_versions(self._policy)
        # Not a part of what the next transfer waits for: it holds the update lease then.
        self._tasks.start(self._loading.load_waiting())

    async def _send_all(self, commands: Sequence[Command]) -> None:
        """Raises at the first failure: the other replicas would wait for a trainer that is blocked."""
        for result in asyncio.as_completed(map(self._registry.send, self._participants, commands)):
            if (error := error_of(await result)) is not None:
                raise _ReplicaFailed(error)


def _workers_of(replicas: Sequence[RegisteredReplica]) -> list[int]:
    return [replica.registration.workers for replica in replicas]


def _errors_in(results: Iterable[CommandResult]) -> list[str]:
    return [error for error in map(error_of, results) if error is not None]
