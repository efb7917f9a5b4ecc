"""One update over all replicas: stage everywhere, try the version on one, make it current on disk, swap the others.

Guarantees: generation is paused nowhere before every replica has staged the new weights or has failed, and what comes
as a delta is staged once the replica's node has made the weights and found their checksum right; until one replica has
generated with the version, all others generate with the old one, and no generation of a rollout uses it; if the
version cannot be used, that replica goes back to the weights that are current, and nothing else has changed; once the
version is current on disk, a replica that fails is replaced, and its successor starts with the new version. So all
replicas end at the same version.
"""

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from deployments.policy.failures import WeightsRefused
from deployments.policy.replicas.commands import AcceptRequests, CommandReport, Stage, Swap, SwapOptions, VersionPayload
from deployments.policy.replicas.fleet import CommandResult, Fleet, error_of
from deployments.policy.replicas.replica_registry import RegisteredReplica
from deployments.policy.updates.trial_results import all_were_lost, must_be_replaced, was_lost
from rollout_client.policy_contract import ReplicaUpdate
from rollout_client.problem_contract import FieldProblem

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
            raise WeightsRefused(FieldProblem(field="weights", message=message))
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
        raise WeightsRefused(FieldProblem(field="weights", message=f"the engine cannot take them: {errors[0]}"))
