"""Makes the named policies of a store out of the parts that the policy without a name is made of, too."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from deployments.policy.named.named_updater import NamedUpdater
from deployments.policy.named.replica_adapters import ReplicaAdapters
from deployments.policy.named_policies import NamedPolicies
from deployments.policy.policy import NamedPolicy
from deployments.policy.replicas.fleet import Fleet
from deployments.policy.settings import PolicySettings
from deployments.policy.update.update_lock import UpdateLock
from deployments.policy.uploads.active_pushes import ActivePushes
from deployments.policy.uploads.preparation import VersionPreparation
from deployments.policy.uploads.pushes import Pushes
from deployments.policy.uploads.upload_store import UploadStore
from deployments.policy.uploads.uploads import Uploads
from deployments.policy.versions.current_version import CurrentVersion
from deployments.policy.versions.housekeeping import Housekeeping
from deployments.policy.versions.initial_version import InitialVersion
from deployments.policy.versions.version_history import PolicyVersions
from deployments.policy.versions.version_store import VersionStore
from deployments.rpc.background_tasks import BackgroundTasks


@dataclass(frozen=True, slots=True)
class StoreParts:
    """What all policies of a store share."""

    folder: Path
    settings: PolicySettings
    run: str
    node_id: str
    fleet: Fleet
    base: PolicyVersions
    """The versions of the full weights."""
    initial: InitialVersion
    update_lock: UpdateLock
    tasks: BackgroundTasks
    housekeeping: Housekeeping
    upload_bytes: Callable[[], int]
    """Of the unfinished uploads of the policy without a name."""


def named_policies_of(parts: StoreParts) -> tuple[NamedPolicies, ReplicaAdapters]:
    """Those that are in the store's folder, and what replicas serve of them."""
    policies: dict[str, NamedPolicy] = {}
    adapters = ReplicaAdapters(parts.fleet, policies, parts.node_id, parts.settings.copy_to_nodes)

    def make(name: str, all_policies: NamedPolicies) -> NamedPolicy:
        return named_policy_of(name, parts, all_policies, adapters)

    folder = parts.folder / "names"
    named = NamedPolicies(folder, make, policies, adapters, parts.fleet, parts.base, parts.update_lock)
    return named, adapters


def named_policy_of(
    name: str, parts: StoreParts, all_policies: NamedPolicies, adapters: ReplicaAdapters
) -> NamedPolicy:
    """The policy as it is on disk, where a store that died may have left half-made files."""
    settings, folder = parts.settings, parts.folder / "names" / name
    version_store = VersionStore(folder, parts.folder)
    upload_store = UploadStore(folder, settings.upload_expiry_s, parts.folder)
    if folder.is_dir():
        version_store.remove_unfinished()
        upload_store.remove_unfinished(version_store.current())
    current = CurrentVersion(version_store.current(), settings.wait_s)
    versions = PolicyVersions(version_store, parts.initial, current, settings.max_version_step, parts.run)
    active = ActivePushes(parts.tasks)

    def bytes_of_others() -> int:
        own = sum(upload_store.bytes_on_disk().values())
        return parts.upload_bytes() + all_policies.upload_bytes - own

    uploads = Uploads(
        upload_store,
        versions,
        parts.initial,
        active,
        parts.tasks,
        parts.housekeeping,
        settings.upload_quota_bytes,
        bytes_of_others,
    )

    async def publish() -> None:
        await all_policies.publish(policy)

    updater = NamedUpdater(name, parts.fleet, versions, parts.base, adapters, parts.update_lock, publish)
    preparation = VersionPreparation(versions, parts.initial, version_store, settings.checkpoint_roots)
    pushes = Pushes(active, uploads, preparation, versions, updater, parts.housekeeping, name)
    policy = NamedPolicy(name, version_store, upload_store, current, versions, uploads, pushes)
    return policy
