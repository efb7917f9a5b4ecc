"""The answer of `GET /policy`: which version is current, which are stored, and what each replica has loaded."""

from collections.abc import Callable

from deployments.policy.named_policies import NamedPolicies
from deployments.policy.replicas.replica_registry import ReplicaRegistry
from deployments.policy.transfer.transfer_ranks import world_size
from deployments.policy.uploads.uploads import Uploads
from deployments.policy.versions.current_version import CurrentVersion
from deployments.policy.versions.version_history import PolicyVersions
from rollout_client.policy_contract import PolicyState, ReplicaPolicy


async def policy_state(
    current: CurrentVersion,
    versions: PolicyVersions,
    uploads: Uploads,
    registry: ReplicaRegistry,
    named: NamedPolicies,
    next_number: Callable[[], int],
    checksums_within_s: float,
) -> PolicyState:
    """Has replicas compute their checksums and waits at most `checksums_within_s` for them; with 0 none is asked.

    Args:
        next_number: says which number the next version may have.
    """
    await registry.forget_the_dead()
    await registry.ask_for_checksums(checksums_within_s)
    replicas = registry.replicas
    return PolicyState(
        current=current.number,
        updating_to=versions.updating_to,
        versions=versions.list(),
        replicas=[
            ReplicaPolicy(
                replica_id=replica.replica_id,
                version=replica.loaded.version,
                checksum=replica.checksum,
                accepts_requests=replica.accepts_requests,
            )
            for replica in replicas
        ],
        transfer_world_size=world_size([replica.registration.workers for replica in registry.started]),
        next_version=next_number(),
        uploads=uploads.states(),
        named=named.states(),
    )
