"""The named policies of a store: adapters over the current full weights, several current at a time.

Guarantees: a policy is served only over the full weights that it was pushed for: when others become current, it is
dropped; the numbers of its versions only go up; everyone who waits learns of each change.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from deployments.policy.failures import PolicyUnknown
from deployments.policy.policy import NamedPolicy, NamedUpdater, ReplicaAdapters
from deployments.policy.replicas.replica_registry import Fleet
from deployments.policy.settings import PolicySettings
from deployments.policy.update.update_lock import UpdateLock
from deployments.policy.uploads.preparation import VersionPreparation
from deployments.policy.uploads.pushes import Pushes
from deployments.policy.uploads.upload_store import UploadStore
from deployments.policy.uploads.uploads import ActivePushes, Uploads
from deployments.policy.versions.current_version import LONG_POLL_S, CurrentVersion, NamedVersions
from deployments.policy.versions.full_weights import InitialVersion
from deployments.policy.versions.housekeeping import ExpiringFiles, Housekeeping
from deployments.policy.versions.version_history import VersionHistory
from deployments.policy.versions.version_store import VersionStore
from deployments.rpc.background_tasks import BackgroundTasks
from rollout_client.contract.base import label_of
from rollout_client.contract.policy import NamedPolicyState


class NamedPolicyRegistry(ExpiringFiles):
    """
    Args:
        folder: with one folder for each policy that was ever pushed.
        make: makes the policy of a name, as it is on disk.
        policies: those that were made, by name.
        base: the versions of the full weights.
    """

    def __init__(
        self,
        folder: Path,
        make: Callable[[str, "NamedPolicyRegistry"], NamedPolicy],
        policies: dict[str, NamedPolicy],
        adapters: ReplicaAdapters,
        fleet: Fleet,
        base: VersionHistory,
        update_lock: UpdateLock,
    ) -> None:
        self._make = make
        self._policies = policies
        self._adapters = adapters
        self._fleet = fleet
        self._base = base
        self._update_lock = update_lock
        self._changed = asyncio.Condition()
        self._calls = Counter[str]()
        """By the name of a policy, the calls about it that are under way."""
        for path in folder.iterdir() if folder.is_dir() else ():
            self.policy(path.name)
        self._drop_of_other_base()
        self._published = NamedVersions(uuid4().hex, time.time_ns(), self._served_numbers())

    def policy(self, name: str) -> NamedPolicy:
        """The policy of this name; one that is not known has neither versions nor uploads."""
        policy = self._policies.get(name)
        if policy is None:
            policy = self._policies[name] = self._make(name, self)
        return policy

    @contextmanager
    def used(self, name: str) -> Iterator[NamedPolicy]:
        """The policy for the length of a call. Afterwards it is forgotten if it has no version and nothing of one, and
        once its upload has expired or its push, which goes on without its caller, is refused.

        So calls with names of which there is no policy leave nothing behind.
        """
        policy = self.policy(name)
        self._calls[name] += 1
        try:
            yield policy
        finally:
            self._calls[name] -= 1
            if not self._calls[name]:
                del self._calls[name]
                self._forget_unknown(policy)

    def _forget_unknown(self, policy: NamedPolicy) -> None:
        if policy.name not in self._calls and not policy.is_known and not policy.pushes.is_under_way:
            self._policies.pop(policy.name, None)
            policy.version_store.trash.discard(policy.version_store.folder)

    def __iter__(self) -> Iterator[NamedPolicy]:
        """In the order of their names."""
        return (policy for _, policy in sorted(self._policies.items()))

    @property
    def upload_bytes(self) -> int:
        """Of all their unfinished uploads."""
        return sum(sum(policy.upload_store.bytes_on_disk().values()) for policy in self)

    def states(self) -> list[NamedPolicyState]:
        return [policy.state() for policy in self if policy.is_known]

    def path_of(self, version: int, checksum: str) -> Path | None:
        """The file of a version that is served, if one has this number and checksum."""
        for policy in self._policies.values():
            served = policy.served
            if served is not None and (served.version, served.checksum) == (version, checksum):
                return policy.weights_of(served)
        return None

    async def note_held(self, held: Mapping[str, int]) -> None:
        """A replica serves these versions: where the store lost its folder, their numbers are not given again."""
        for name, version in held.items():
            policy = self.policy(name)
            if version > policy.current.number:
                policy.version_store.make_current(version)
                await policy.current.publish(version)

    async def watch(self, seen: NamedVersions | None) -> NamedVersions:
        """Which version of each is current, as soon as that differs from `seen`, or unchanged after `LONG_POLL_S`."""
        try:
            async with asyncio.timeout(LONG_POLL_S), self._changed:
                await self._changed.wait_for(lambda: self._published != seen)
        except TimeoutError:
            return self._published
        return self._published

    async def wait_for(self, name: str, min_version: int, version: int | None, wait_s: float | None) -> NamedVersions:
        """Returns what is current once the policy is at least at `min_version` and, if given, exactly at `version`.

        Raises:
            PolicyUnknown: it is not served, or no longer.
            PolicyNotCurrent: as `CurrentVersion.wait_for` does.
        """
        self.refuse_unknown(name)
        await self._policies[name].current.wait_for(min_version, version, wait_s)
        self.refuse_unknown(name)
        return self._published

    def refuse_unknown(self, name: str) -> None:
        """Raises `PolicyUnknown` unless a policy of this name is served."""
        served = self._served_numbers()
        if name in served:
            return
        labels = ", ".join(label_of(each, number) for each, number in sorted(served.items()))
        known = f"there are {labels}" if served else "there are none"
        policy = self._policies.get(name)
        message = f"there is no policy of this name; {known}"
        if policy is not None and policy.current.number:
            last = label_of(name, policy.current.number)
            message = f"the policy was dropped after {last}, or the full weights under it were replaced; {known}"
        raise PolicyUnknown.of("policy.name", message, name)

    async def publish(self, policy: NamedPolicy) -> None:
        """The version of this policy that is current on disk is served from now on."""
        await policy.publish()
        await self._publish()

    async def drop(self, name: str) -> None:
        """Serves the policy no longer; its generations under way end with its adapter.

        Raises:
            PolicyUnknown: it is not served.
        """
        self.refuse_unknown(name)
        async with self._update_lock.lease(f"the policy {name} is being dropped"):
            self.refuse_unknown(name)
            self._policies[name].drop()
            await self._publish()
            base = self._base.desired.full
            await self._adapters.give([each for each in self._fleet.registry.started if each.loaded.full == base])

    async def base_changed(self) -> None:
        """Drops those that were pushed for other full weights than the current ones; replicas have done so.

        The caller holds the update lease.
        """
        if self._drop_of_other_base():
            await self._publish()

    def _drop_of_other_base(self) -> bool:
        base = self._base.desired.full
        outdated = [policy for policy in self if policy.served is not None and policy.served.base != base]
        for policy in outdated:
            policy.drop()
        return bool(outdated)

    async def _publish(self) -> None:
        revision = max(time.time_ns(), self._published.revision + 1)
        self._published = NamedVersions(self._published.store, revision, self._served_numbers())
        async with self._changed:
            self._changed.notify_all()

    def _served_numbers(self) -> dict[str, int]:
        return {policy.name: policy.served.version for policy in self if policy.served is not None}

    def drop_expired(self) -> None:
        for policy in self:
            policy.uploads.drop_expired()
            self._forget_unknown(policy)

    def next_expiry_s(self) -> float | None:
        expiries = (policy.uploads.next_expiry_s() for policy in self)
        return min((expiry for expiry in expiries if expiry is not None), default=None)


@dataclass(frozen=True, slots=True)
class StoreParts:
    """What all policies of a store share."""

    folder: Path
    settings: PolicySettings
    run: str
    node_id: str
    fleet: Fleet
    base: VersionHistory
    """The versions of the full weights."""
    initial: InitialVersion
    update_lock: UpdateLock
    tasks: BackgroundTasks
    housekeeping: Housekeeping
    upload_bytes: Callable[[], int]
    """Of the unfinished uploads of the policy without a name."""


def named_policies_of(parts: StoreParts) -> tuple[NamedPolicyRegistry, ReplicaAdapters]:
    """Those that are in the store's folder, and what replicas serve of them."""
    policies: dict[str, NamedPolicy] = {}
    adapters = ReplicaAdapters(parts.fleet, policies, parts.node_id, parts.settings.copy_to_nodes)

    def make(name: str, all_policies: NamedPolicyRegistry) -> NamedPolicy:
        return named_policy_of(name, parts, all_policies, adapters)

    folder = parts.folder / "names"
    named = NamedPolicyRegistry(folder, make, policies, adapters, parts.fleet, parts.base, parts.update_lock)
    return named, adapters


def named_policy_of(
    name: str, parts: StoreParts, all_policies: NamedPolicyRegistry, adapters: ReplicaAdapters
) -> NamedPolicy:
    """The policy as it is on disk, where a store that died may have left half-made files."""
    settings, folder = parts.settings, parts.folder / "names" / name
    version_store = VersionStore(folder, parts.folder)
    upload_store = UploadStore(folder, settings.upload_expiry_s, parts.folder)
    if folder.is_dir():
        version_store.remove_unfinished()
        upload_store.remove_unfinished(version_store.current())
    current = CurrentVersion(version_store.current(), settings.wait_s)
    versions = VersionHistory(version_store, parts.initial, current, settings.max_version_step, parts.run)
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
