"""What the result of a trial on one replica says, for full weights and for adapters of named policies. No I/O."""

from collections.abc import Iterable

from deployments.policy.failures import VersionUntried
from deployments.policy.replicas.fleet import CommandResult, error_of
from deployments.policy.replicas.replica_registry import ReplicaLost, ReplicaTimedOut
from rollout_client.problem_contract import FieldProblem


def was_lost(result: CommandResult) -> bool:
    """Whether the replica left or died meanwhile, which proves nothing about the version."""
    return isinstance(result, ReplicaLost) and not isinstance(result, ReplicaTimedOut)


def must_be_replaced(result: CommandResult) -> bool:
    """Whether the replica cannot go on with what it had before: it was lost, did not report in time, or broke."""
    return isinstance(result, ReplicaLost) or result.broken


def all_were_lost(results: Iterable[CommandResult]) -> VersionUntried:
    reasons = "; ".join(sorted({str(error_of(result)) for result in results}))
    return VersionUntried(FieldProblem(field="weights", message=f"all replicas were lost before that: {reasons}"))
