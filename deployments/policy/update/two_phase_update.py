"""One update over all replicas: stage everywhere, try the version on one, make it current on disk, swap the others.

Guarantees: two updates never mix; generation is paused nowhere before every replica has staged the new weights or has
failed, and what comes as a delta is staged once the replica's node has made the weights and found their checksum right
(without replicas the store does); until one replica has generated with the version, all others generate with the old
one, and no generation of a rollout uses it; if the version cannot be used, that replica goes back to the weights that
are current, and nothing else has changed; once the version is current on disk, a replica that fails is replaced, and
its successor starts with the new version. So all replicas end at the same version, and it is published once they have
loaded it.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from deployments.policy.failures import VersionUntried, WeightsRefused
from deployments.policy.replicas.commands import AcceptRequests, CommandReport, Stage, Swap, SwapOptions, VersionPayload
from deployments.policy.replicas.replica_registry import (
    CommandResult,
    Fleet,
    RegisteredReplica,
    ReplicaLost,
    ReplicaTimedOut,
    error_of,
)
from deployments.policy.update.activation import AdaptersOfReplicas, VersionActivation
from deployments.policy.update.update_lock import UpdateLock
from deployments.policy.uploads.pushes import Updates
from deployments.policy.versions.payloads import Payloads
from deployments.policy.versions.version_history import VersionHistory
from deployments.policy.versions.version_store import StoredVersion
from deployments.policy.versions.weight_checks import changed_values
from rollout_client.contract.policy import PolicyUpdate, PushOptions, ReplicaUpdate

UNSEEN_ADAPTER = (
    "The adapter is not zero, but so small that it changes no log-probability of the canary in the engine's precision: "
    "rollouts are as without it."
)


def was_lost(result: CommandResult) -> bool:
    """Whether the replica left or died meanwhile, which proves nothing about the version."""
    return isinstance(result, ReplicaLost) and not isinstance(result, ReplicaTimedOut)


def must_be_replaced(result: CommandResult) -> bool:
    """Whether the replica cannot go on with what it had before: it was lost, did not report in time, or broke."""
    return isinstance(result, ReplicaLost) or result.broken


def adapter_warnings(result: CommandResult | None) -> list[str]:
    """What the sender of an adapter is told of a trial that it has passed."""
    is_unseen = isinstance(result, CommandReport) and result.changes_nothing
    return [UNSEEN_ADAPTER] if is_unseen else []


def all_were_lost(results: Iterable[CommandResult]) -> VersionUntried:
    reasons = "; ".join(sorted({str(error_of(result)) for result in results}))
    return VersionUntried.of("weights", f"all replicas were lost before that: {reasons}")


logger = logging.getLogger("rollout_service.policy")


@dataclass(frozen=True, slots=True)
class VersionUpdate:
    """The update to one version."""

    fleet: Fleet
    payload: VersionPayload
    options: SwapOptions
    make_current: Callable[[], None]
    """Makes the version current on disk."""
    load_current: Callable[[RegisteredReplica], Awaitable[None]]
    """Loads what is current on disk into a replica that holds the version on trial; it is replaced if that fails."""
    judge_unchanged: Callable[[], Awaitable[None]]
    """Is called where the canary's log-probabilities are those of the weights before; raises `WeightsRefused` if they
    cannot be."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What came of trying a version."""

    replica: RegisteredReplica | None
    """The one that can generate with it, and whose generations wait; `None` without replicas."""
    swap: CommandReport | None
    lost: dict[RegisteredReplica, CommandResult]
    """The replicas that were lost in a trial, which proves nothing about the version."""


async def update_replicas(update: VersionUpdate, replicas: Sequence[RegisteredReplica]) -> list[ReplicaUpdate]:
    """Loads the version into `replicas`; returns the outcome of each, in the same order.

    Raises:
        WeightsRefused: no engine could load the weights, or the one that tried them cannot generate with them.
        VersionUntried: every replica was lost before it had tried them.
    """
    fleet, version, size_bytes = update.fleet, update.payload.version, update.payload.size_bytes
    results = dict(zip(replicas, await fleet.send_all(replicas, Stage(update.payload), size_bytes), strict=True))
    refuse_if_all_refused(list(results.values()))
    staged = {
        replica: result
        for replica, result in results.items()
        if isinstance(result, CommandReport) and result.error is None
    }
    trial = await try_version(update, list(staged))
    results |= trial.lost
    if trial.replica is None and replicas:
        for replica, result in results.items():
            fleet.replace_if_registered(replica, str(error_of(result)), version)
        raise all_were_lost(results.values())
    await make_current(update, trial)
    others = [replica for replica in staged if replica is not trial.replica and replica not in trial.lost]
    first = [replica for replica in (trial.replica,) if replica is not None]
    commands = [AcceptRequests() for _ in first] + [Swap(update.options) for _ in others]
    sent = await fleet.send_each([*first, *others], commands, size_bytes)
    results |= dict(zip([*first, *others], sent, strict=True))
    for replica in first:
        results[replica] = with_swap(results[replica], trial.swap)
    return [fleet.outcome(replica, results[replica], version, staged.get(replica)) for replica in replicas]


async def try_version(update: VersionUpdate, staged: Sequence[RegisteredReplica]) -> Trial:
    """Lets one replica after the other try the version, until one is not lost meanwhile.

    Raises:
        WeightsRefused: the replica cannot generate with the version. It goes back, or is replaced.
    """
    fleet, lost = update.fleet, dict[RegisteredReplica, CommandResult]()
    for replica in staged:
        swap = await fleet.send(replica, Swap(update.options, is_trial=True), update.payload.size_bytes)
        result = swap if error_of(swap) is not None else await fleet.send_canary(replica, update.payload.size_bytes)
        if was_lost(result):
            lost[replica] = result
            continue
        if (error := error_of(result)) is not None:
            if must_be_replaced(result):
                fleet.replace_if_registered(replica, error, update.payload.version)
            else:
                await update.load_current(replica)
            message = f"a replica could not generate with them and went back: {error}"
            raise WeightsRefused.of("weights", message)
        if isinstance(result, CommandReport) and result.changes_nothing:
            try:
                await update.judge_unchanged()
            except WeightsRefused:
                await update.load_current(replica)
                raise
        return Trial(replica, swap if isinstance(swap, CommandReport) else None, lost)
    return Trial(None, None, lost)


async def make_current(update: VersionUpdate, trial: Trial) -> None:
    """Makes the version current on disk. If that fails, the replica that tried it goes back."""
    try:
        update.make_current()
    except Exception:
        if trial.replica is not None:
            await update.load_current(trial.replica)
        raise


def with_swap(accepted: CommandResult, swap: CommandReport | None) -> CommandResult:
    """The report on the end of the trial with the costs of its swap."""
    if not isinstance(accepted, CommandReport) or swap is None:
        return accepted
    return replace(accepted, costs=swap.costs + accepted.costs)


def refuse_if_all_refused(staged: Sequence[CommandResult]) -> None:
    """Raises `WeightsRefused` if every replica that is alive and intact failed to stage the weights.

    A replica that died or broke proves nothing about the weights.
    """
    reports = [result for result in staged if isinstance(result, CommandReport) and not result.broken]
    errors = [report.error for report in reports if report.error is not None]
    if errors and len(errors) == len(reports):
        raise WeightsRefused.of("weights", f"the engine cannot take them: {errors[0]}")


UNSEEN = "The weights change no log-probability of the canary"
SEEN_SHARE = 0.001
"""Of the values that every text is computed with. Where more have changed, some log-probability changes even if each
changed by its last bit alone."""


class Updater(Updates):
    def __init__(
        self,
        fleet: Fleet,
        versions: VersionHistory,
        payloads: Payloads,
        activation: VersionActivation,
        update_lock: UpdateLock,
        adapters: AdaptersOfReplicas,
    ) -> None:
        self._fleet = fleet
        self._versions = versions
        self._payloads = payloads
        self._activation = activation
        self._update_lock = update_lock
        self._adapters = adapters

    def refuse(self, version: int, options: PushOptions) -> None:
        self._versions.refuse_taken(version)
        self._update_lock.refuse_if_busy(options)

    async def update(self, info: StoredVersion, file: Path, options: PushOptions) -> PolicyUpdate:
        """Waits for the update lease, then loads the version into every replica.

        Args:
            info: of an adapter, `base` is filled in here: the full weights that are current then.
            file: the weights, or a delta, on the file system of the version store.

        Raises:
            UpdateUnderWay: another update holds the lease, and the caller does not wait.
            PolicyNotCurrent: an adapter was trained on other full weights than the current ones.
            VersionRefused: another update has taken the number meanwhile, or a higher one.
            WeightsRefused: no engine could load the weights, or the one that tried them cannot generate with them.
            VersionUntried: every replica was lost before it had tried them.
        """
        self.refuse(info.version, options)
        async with self._update_lock.lease(f"version {info.version} is being loaded by the replicas"):
            # Once the version is listed, a replica that dies is part of the update, and its outcome says so.
            await self._fleet.registry.forget_the_dead()
            warnings: list[str] = []
            if info.kind == "adapter":
                await asyncio.to_thread(self._versions.refuse_other_base, options)
                warnings += self._versions.warnings_of_base(self._versions.last_adapter_base, options)
                info = info.model_copy(update={"base": self._versions.desired.full})
            else:
                info = info.model_copy(update={"keeps_prefix_cache": not options.reset_prefix_cache})
            async with self._versions.adding(info, file):
                try:
                    replicas = await self._update_replicas(info, options, warnings)
                finally:
                    if self._versions.desired.version == info.version:
                        if info.kind == "adapter":
                            self._versions.last_adapter_base = self._versions.full_weights
                        await self._activation.activate()
        canary_s = max((replica.canary_s for replica in replicas), default=0.0)
        return PolicyUpdate(
            version=info.version,
            checksum=info.checksum,
            replicas=replicas,
            canary_s=canary_s,
            keeps_prefix_cache=info.keeps_prefix_cache,
            base=info.base if info.kind == "adapter" else None,
            warnings=warnings,
        )

    async def _update_replicas(
        self, info: StoredVersion, options: PushOptions, warnings: list[str]
    ) -> list[ReplicaUpdate]:
        replicas = self._replicas_for(info)
        if not replicas or info.base != self._versions.desired.full:
            # No node applies the delta: whether it makes what its sender says is found out here.
            await asyncio.to_thread(self._versions.file, info.version)
        update = VersionUpdate(
            self._fleet,
            await self._payloads.payload(info.version, held=self._versions.desired.full),
            SwapOptions(options.mode, options.reset_prefix_cache),
            lambda: self._versions.make_current(info.version),
            self._load_current,
            lambda: self._judge_unchanged(info, warnings),
        )
        return await update_replicas(update, replicas)

    async def _judge_unchanged(self, info: StoredVersion, warnings: list[str]) -> None:
        """Judges a version that changes no log-probability of the canary: it may be a very small change, or none.

        Raises:
            WeightsRefused: so many values differ from those before that the engine cannot have taken them.
        """
        if info.kind == "adapter":
            warnings.append(UNSEEN_ADAPTER)
            return
        before = self._versions.desired.full
        if not self._versions.has_weights(before):
            warnings.append(f"{UNSEEN}; how many values differ from version {before} is not known.")
            return
        old, new = await asyncio.to_thread(lambda: [*map(self._versions.file, (before, info.version))])
        values = await asyncio.to_thread(changed_values, old, new)
        if not values.changed:
            return
        finding = f"{UNSEEN}, and {values.changed} of {values.total} values differ from version {before}"
        if values.share_of_all_texts >= SEEN_SHARE:
            message = f"{finding}: the engine does not generate with them"
            raise WeightsRefused.of("weights", message)
        warnings.append(f"{finding}.")

    async def _load_current(self, replica: RegisteredReplica) -> None:
        """Lets a replica that holds a version on trial go back to what is current. It is replaced if that fails.

        That is so too if only other replicas have the current weights: a trainer sent them there.
        """
        if self._payloads.can_complete(replica.loaded):
            await self._fleet.load(replica, await self._payloads.missing(replica.loaded))
            if self._adapters.are_needed_by(replica):
                # The trial took them off.
                await self._adapters.give([replica])
        else:
            self._fleet.replace_if_registered(replica, "the weights before the trial came from a trainer's memory")

    def _replicas_for(self, info: StoredVersion) -> list[RegisteredReplica]:
        """The replicas that have started; of an adapter only those that hold its base.

        The others load the version before they accept requests.
        """
        replicas = self._fleet.registry.started
        if info.kind != "adapter":
            return replicas
        return [replica for replica in replicas if replica.loaded.full == info.base]
