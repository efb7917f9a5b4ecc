"""One update over all replicas: stage everywhere, make the version current on disk, swap everywhere.

Guarantees: generation is paused nowhere before every replica has staged the new weights or has failed; if no engine can
load the weights, nothing has changed; once the version is current on disk, a replica that fails is replaced, and its
successor starts with the new version. So all replicas end at the same version.
"""

from collections.abc import Callable, Sequence

from deployments.policy.failures import WeightsRefused
from deployments.policy.replicas.commands import CommandReport, Stage, Swap, SwapOptions, VersionPayload
from deployments.policy.replicas.fleet import CommandResult, Fleet
from deployments.policy.replicas.replica_registry import RegisteredReplica
from rollout_client.policy_contract import ReplicaUpdate
from rollout_client.problem_contract import FieldProblem


async def update_replicas(
    fleet: Fleet,
    replicas: Sequence[RegisteredReplica],
    payload: VersionPayload,
    options: SwapOptions,
    make_current: Callable[[], None],
) -> list[ReplicaUpdate]:
    """Loads the version of `payload` into `replicas`; returns the outcome of each, in the same order.

    Args:
        make_current: makes the version current on disk.

    Raises:
        WeightsRefused: no engine could load the weights; nothing has changed.
    """
    staged = dict(zip(replicas, await fleet.send_all(replicas, Stage(payload)), strict=True))
    refuse_if_all_refused(list(staged.values()))
    make_current()
    ready = {
        replica: result
        for replica, result in staged.items()
        if isinstance(result, CommandReport) and result.error is None
    }
    swapped = dict(zip(ready, await fleet.send_all(list(ready), Swap(options)), strict=True))
    return [
        fleet.outcome(replica, (staged | swapped)[replica], payload.version, ready.get(replica)) for replica in replicas
    ]


def refuse_if_all_refused(staged: Sequence[CommandResult]) -> None:
    """Raises `WeightsRefused` if every replica that is alive and intact failed to stage the weights.

    A replica that died or broke proves nothing about the weights.
    """
    reports = [result for result in staged if isinstance(result, CommandReport) and not result.broken]
    errors = [report.error for report in reports if report.error is not None]
    if errors and len(errors) == len(reports):
        raise WeightsRefused(FieldProblem(field="weights", message=f"the engine cannot take them: {errors[0]}"))
