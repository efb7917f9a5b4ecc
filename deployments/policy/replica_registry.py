"""The generator replicas that have registered: sending them commands, and replacing those that fail.

A replica polls for its next command and reports on the previous one with it: Serve's handles can neither address a
single replica nor reach one that is still starting. Guarantees: each command reaches the replica that it is for at most
once; whoever waits for a report learns that the replica died, registered again, or took too long.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import count

from deployments.policy.cluster import Cluster
from deployments.policy.commands import (
    Command,
    CommandCosts,
    CommandReport,
    ComputeChecksum,
    LoadedWeights,
    NumberedCommand,
    ReplicaNotRegistered,
    ReplicaRegistration,
    Stage,
    StartTransfer,
    Swap,
    SwapOptions,
    VersionPayload,
)
from deployments.policy.failures import UpdateUnderWay
from rollout_client.contract.policy import ReplicaUpdate, SwitchOptions

logger = logging.getLogger("rollout_service.policy")
LONG_POLL_S = 20.0
LIVENESS_POLL_S = 0.5
CHECKSUM_POLL_S = 0.05


class ReplicaLost(Exception):
    """The replica will not report; the message says why."""


class ReplicaTimedOut(ReplicaLost):
    """The replica did not report in time."""


@dataclass(eq=False)
class RegisteredReplica:
    registration: ReplicaRegistration
    loaded: LoadedWeights
    accepts_requests: bool = False
    """Whether it was told to accept requests; a replica that starts is not ready before."""
    is_starting: bool = False
    """Whether it is being given the current version; until then it takes part in no update and no transfer."""
    loading: tuple[int, ...] = ()
    """Versions that it is being given outside of updates."""
    checksum: str | None = None
    """Checksum of the weights in its engine; `None` until somebody has asked for it and the replica has computed it."""
    is_checksum_asked: bool = False
    """Whether the replica was told to compute the checksum of what it holds."""
    held_until: float = 0.0
    """When its hold ends by itself, as it has reported last, by the clock of the event loop."""
    commands: "asyncio.Queue[NumberedCommand]" = field(default_factory=asyncio.Queue)
    """Not yet fetched by the replica."""
    awaited_reports: "dict[int, asyncio.Future[CommandReport]]" = field(default_factory=dict)
    """By the number of the command."""

    @property
    def replica_id(self) -> str:
        return self.registration.replica_id

    def forget_checksum(self) -> None:
        """The weights in its engine have changed, or were loaded again."""
        self.checksum, self.is_checksum_asked = None, False


class _UpdateLock:
    """Held by an update, by a weight transfer, or while it is decided whether a replica that starts may join."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self.activity: str | None = None
        """As its owner names it; `None` if it is free, or the owner waits for nobody."""

    @asynccontextmanager
    async def lease(self, activity: str | None = None) -> AsyncIterator[None]:
        """Waits for the lease and holds it for the block.

        Args:
            activity: what the owner does, for callers that do not wait; without it, callers are never refused.
        """
        async with self._lock:
            self.activity = activity
            try:
                yield
            finally:
                self.activity = None

    def refuse_if_busy(self, options: SwitchOptions) -> None:
        """Raises `UpdateUnderWay` if the caller does not wait and an update or a transfer holds the lease."""
        if options.if_busy == "refuse" and self.activity is not None:
            message = f"{self.activity}; wait for it, or say if_busy=wait"
            raise UpdateUnderWay.of("if_busy", message, "refuse")


CommandResult = CommandReport | ReplicaLost
GB = 10**9


class ReplicaRegistry:
    """Knows the replicas that have registered, sends them commands, and replaces those that fail.

    Args:
        command_timeout_s: a replica that takes longer for one command counts as lost.
        command_timeout_s_per_gb: that limit is so much longer for each gigabyte (10^9 bytes) of weights.
        canary_timeout_s: a replica that takes longer for its canary has failed it; the same addition holds.
    """

    def __init__(
        self,
        cluster: Cluster,
        command_timeout_s: float,
        command_timeout_s_per_gb: float = 0.0,
        canary_timeout_s: float = 60.0,
    ) -> None:
        self._cluster = cluster
        self._command_timeout_s = command_timeout_s
        self._command_timeout_s_per_gb = command_timeout_s_per_gb
        self._canary_timeout_s = canary_timeout_s
        self._replicas: dict[str, RegisteredReplica] = {}
        self._numbers = count(1)
        self.update_lock = _UpdateLock()

    @property
    def replicas(self) -> list[RegisteredReplica]:
        """In the order in which they registered."""
        return list(self._replicas.values())

    @property
    def started(self) -> list[RegisteredReplica]:
        """The replicas that take part in updates and transfers, in the order in which they registered."""
        return [replica for replica in self.replicas if not replica.is_starting]

    @property
    def is_held(self) -> bool:
        """Whether a hold keeps a replica from generating."""
        return any(replica.held_until > asyncio.get_running_loop().time() for replica in self.replicas)

    @property
    def loading(self) -> set[int]:
        """Versions that replicas are being given outside of updates."""
        return {version for replica in self.replicas for version in replica.loading}

    def register(self, registration: ReplicaRegistration) -> RegisteredReplica:
        """Adds the replica; a replica of the same id that was registered before is forgotten with its commands."""
        self.forget(registration.replica_id, "it registered again")
        replica = self._replicas[registration.replica_id] = RegisteredReplica(registration, registration.loaded)
        if registration.held_s:
            replica.held_until = asyncio.get_running_loop().time() + registration.held_s
        return replica

    def has(self, replica: RegisteredReplica) -> bool:
        """Whether it is registered and has not registered again since."""
        return self._replicas.get(replica.replica_id) is replica

    def forget(self, replica_id: str, reason: str) -> None:
        """Removes the replica and raises `ReplicaLost` for those who wait for its reports; unknown ids are ignored."""
        replica = self._replicas.pop(replica_id, None)
        for report in replica.awaited_reports.values() if replica else ():
            if not report.done():
                report.set_exception(ReplicaLost(reason))

    async def drop_dead(self) -> None:
        replicas = self.replicas
        alive = await asyncio.gather(*(self._cluster.is_alive(replica.registration.actor) for replica in replicas))
        for replica, lives in zip(replicas, alive, strict=True):
            if not lives:
                self._forget_dead(replica)

    async def next_command(self, replica_id: str, report: CommandReport | None) -> NumberedCommand | None:
        """Takes the report on the previous command and waits for the next one; `None` after `LONG_POLL_S` without one.

        Raises:
            ReplicaNotRegistered: the replica has to register first.
        """
        replica = self._registered(replica_id)
        if report is not None:
            replica.held_until = asyncio.get_running_loop().time() + report.held_s
            if report.loaded != replica.loaded:
                replica.loaded = report.loaded
                replica.forget_checksum()
            awaited = replica.awaited_reports.pop(report.command_number, None)
            if awaited is not None and not awaited.done():
                awaited.set_result(report)
        with suppress(TimeoutError):
            async with asyncio.timeout(LONG_POLL_S):
                return await replica.commands.get()
        return None

    def record_checksum(self, replica_id: str, loaded: LoadedWeights, checksum: str) -> None:
        """Ignores the checksum if the replica holds other weights by now. Raises `ReplicaNotRegistered`."""
        replica = self._registered(replica_id)
        if replica.loaded == loaded:
            replica.checksum = checksum

    async def ask_for_checksums(self, wait_s: float) -> None:
        """Has replicas compute the checksums that are not known; returns once all are known, or after `wait_s`.

        With 0 no replica is asked.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        while loop.time() < deadline:
            unknown = [replica for replica in self._replicas.values() if replica.checksum is None]
            if not unknown:
                return
            for replica in unknown:
                self._ask_for_checksum(replica)
            await asyncio.sleep(CHECKSUM_POLL_S)

    def _ask_for_checksum(self, replica: RegisteredReplica) -> None:
        """Its report says only that the computation has begun, so nobody waits for that."""
        if not replica.is_checksum_asked:
            replica.is_checksum_asked = True
            replica.commands.put_nowait(NumberedCommand(next(self._numbers), ComputeChecksum()))

    async def send(
        self, replica: RegisteredReplica, command: Command, size_bytes: int = 0, timeout_s: float | None = None
    ) -> CommandResult:
        """Queues the command for the replica and waits for its report; returns it, or why there is none.

        Args:
            size_bytes: of the weights that the command is about.
            timeout_s: in place of the limit that follows from the size.
        """
        if not self.has(replica):
            return ReplicaLost("it has left")
        if timeout_s is None:
            timeout_s = self._command_timeout_s + self._command_timeout_s_per_gb * size_bytes / GB
        numbered = NumberedCommand(next(self._numbers), command)
        report: asyncio.Future[CommandReport] = asyncio.get_running_loop().create_future()
        replica.awaited_reports[numbered.number] = report
        replica.commands.put_nowait(numbered)
        watch = asyncio.create_task(self._forget_if_dead(replica))
        try:
            async with asyncio.timeout(timeout_s):
                return await report
        except TimeoutError:
            return ReplicaTimedOut(f"it did not report within {timeout_s:g} s")
        except ReplicaLost as lost:
            return lost
        finally:
            watch.cancel()
            replica.awaited_reports.pop(numbered.number, None)
            if isinstance(command, Swap | StartTransfer):
                # Also where the replica has the same version again, after a transfer that broke off.
                replica.forget_checksum()

    async def _forget_if_dead(self, replica: RegisteredReplica) -> None:
        while await self._cluster.is_alive(replica.registration.actor):
            await asyncio.sleep(LIVENESS_POLL_S)
        self._forget_dead(replica)

    def _forget_dead(self, replica: RegisteredReplica) -> None:
        if self.has(replica):
            logger.warning("A generator replica died.", extra={"replica_id": replica.replica_id})
            self.forget(replica.replica_id, "it died")

    def _registered(self, replica_id: str) -> RegisteredReplica:
        if replica_id not in self._replicas:
            raise ReplicaNotRegistered(replica_id)
        return self._replicas[replica_id]

    async def send_all(
        self, replicas: Sequence[RegisteredReplica], command: Command, size_bytes: int = 0
    ) -> dict[RegisteredReplica, CommandResult]:
        """Sends one command to all of them and waits for all results, in the same order."""
        return await self.send_each(dict.fromkeys(replicas, command), size_bytes)

    async def send_each(
        self, commands: Mapping[RegisteredReplica, Command], size_bytes: int = 0
    ) -> dict[RegisteredReplica, CommandResult]:
        """Sends each replica its command and waits for all results, in the same order."""
        sending = (self.send(replica, command, size_bytes) for replica, command in commands.items())
        return dict(zip(commands, await asyncio.gather(*sending), strict=True))

    def canary_timeout_s(self, size_bytes: int = 0) -> float:
        """The limit of a canary, which the replica itself ends, so that it can go on with other weights."""
        return self._canary_timeout_s + self._command_timeout_s_per_gb * size_bytes / GB

    async def load(self, replica: RegisteredReplica, payloads: Sequence[VersionPayload]) -> bool:
        """Loads the payloads one after the other; returns false if the replica failed, which is replaced then.

        Nothing is generated with full weights whose adapter follows.
        """
        for payload in payloads:
            for command in (Stage(payload), Swap(SwapOptions(), is_trial=payload is not payloads[-1])):
                error = error_of(await self.send(replica, command, payload.size_bytes))
                if error is not None:
                    self.replace_if_registered(replica, error, payload.version)
                    return False
        return True

    def replace(self, replica: RegisteredReplica, reason: str, version: int | None = None) -> None:
        """Ends the replica's actor, so that Serve starts another; `version` is the one that it should have loaded."""
        extra = {"replica_id": replica.replica_id, "version": version}
        logger.warning("A generator replica is replaced: %s", reason, extra=extra)
        self.forget(replica.replica_id, reason)
        self._cluster.kill(replica.registration.actor)

    def replace_if_registered(self, replica: RegisteredReplica, reason: str, version: int | None = None) -> None:
        """Like `replace`, except that a replica which died, or which has registered again since, is left alone."""
        if self.has(replica):
            self.replace(replica, reason, version)

    def outcome(
        self, replica: RegisteredReplica, last: CommandResult, version: int, costs: CommandCosts | None = None
    ) -> ReplicaUpdate:
        """The outcome of an update to `version` for one replica; a replica that failed is replaced.

        Args:
            last: result of the last command that was sent to the replica.
            costs: of all commands of the update; by default those of the last one.
        """
        if isinstance(last, CommandReport) and last.error is None:
            costs = last.costs if costs is None else costs
            return ReplicaUpdate(replica_id=replica.replica_id, status="swapped", **asdict(costs))
        error = error_of(last)
        self.replace(replica, str(error), version)
        return ReplicaUpdate(replica_id=replica.replica_id, status="replaced", error=error)


def error_of(result: CommandResult) -> str | None:
    return str(result) if isinstance(result, ReplicaLost) else result.error
