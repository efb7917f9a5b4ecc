"""What the result of a trial on one replica says, for full weights and for adapters of named policies. No I/O."""

from collections.abc import Iterable

from deployments.policy.failures import VersionUntried
from deployments.policy.replicas.commands import CommandReport
from deployments.policy.replicas.fleet import CommandResult, error_of
from deployments.policy.replicas.replica_registry import ReplicaLost, ReplicaTimedOut
from rollout_client.problem_contract import FieldProblem

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
    return VersionUntried(FieldProblem(field="weights", message=f"all replicas were lost before that: {reasons}"))
