"""The policies of a store: one without a name, and named ones, adapters over its full weights, several at a time.

Guarantees: a named policy is served only over the full weights that it was pushed for: when others become current, it
is dropped; everyone who waits learns of each change.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

from deployments.policy.failures import PolicyUnknown
from deployments.policy.policy import Policy
from deployments.policy.versions.current_version import LONG_POLL_S, NamedVersions
from deployments.policy.versions.full_weights import InitialVersion
from deployments.policy.versions.housekeeping import ExpiringFiles, Housekeeping
from deployments.protocols.weight_versions import RollingActivation
from deployments.rpc.background_tasks import BackgroundTasks
from rollout_client.contract.base import label_of

if TYPE_CHECKING:
    from deployments.policy.settings import PolicySettings


class PolicyRegistry(ExpiringFiles):
    """All policies that are in the store's folder, and those that are pushed for the first time.

    Args: as in `Policy`.
    """

    def __init__(
        self,
        root: Path,
        settings: "PolicySettings",
        run: str,
        initial: InitialVersion,
        tasks: BackgroundTasks,
        housekeeping: Housekeeping,
    ) -> None:
        def open_policy(name: str | None) -> Policy:
            return Policy(name, root, settings, run, initial, tasks, housekeeping)

        self._open: Callable[[str], Policy] = open_policy
        self.unnamed = open_policy(None)
        self._named: dict[str, Policy] = {}
        """By name. All that were ever pushed; those without a version are not served."""
        self._changed = asyncio.Condition()
        self._calls = Counter[str]()
        """By the name of a policy, the calls about it that are under way."""
        for path in sorted(root.glob("names/*")):
            self._policy(path.name)
        self._drop_outdated()
        self._rolling: RollingActivation | None = None
        self._published = NamedVersions(uuid4().hex, time.time_ns(), self._served_numbers())

    def _policy(self, name: str) -> Policy:
        """The policy of this name; one that is not known has neither versions nor uploads."""
        policy = self._named.get(name)
        if policy is None:
            policy = self._named[name] = self._open(name)
        return policy

    @contextmanager
    def used(self, name: str | None) -> Iterator[Policy]:
        """The policy for the length of a call. Afterwards a named one is forgotten if it has no version and nothing of
        one, and once its upload has expired or its push, which goes on without its caller, is refused.

        So calls with names of which there is no policy leave nothing behind.
        """
        if name is None:
            yield self.unnamed
            return
        policy = self._policy(name)
        self._calls[name] += 1
        try:
            yield policy
        finally:
            self._calls[name] -= 1
            if not self._calls[name]:
                del self._calls[name]
                self._forget_unknown(name)

    def _forget_unknown(self, name: str) -> None:
        policy = self._named[name]
        if name not in self._calls and not policy.is_known and not policy.pushes.are_running:
            del self._named[name]
            policy.version_store.trash.discard(policy.version_store.folder)

    @property
    def named(self) -> dict[str, Policy]:
        """By name, in the order of their names."""
        return dict(sorted(self._named.items()))

    def path_of(self, version: int, checksum: str) -> Path | None:
        """The file of a version of a named policy that is served, if one has this number and checksum."""
        for policy in self.named.values():
            served = policy.served
            if served is not None and (served.version, served.checksum) == (version, checksum):
                return policy.weights_of(served)
        return None

    async def record_served(self, versions: Mapping[str, int]) -> None:
        """A replica serves these versions: where the store lost its folder, their numbers are not given again."""
        for name, version in versions.items():
            policy = self._policy(name)
            if version > policy.current.number:
                policy.version_store.make_current(version)
                await policy.current.publish(version)

    async def watch_named(self, seen: NamedVersions | None) -> NamedVersions:
        """Which version of each is current, as soon as that differs from `seen`, or unchanged after `LONG_POLL_S`."""
        try:
            async with asyncio.timeout(LONG_POLL_S), self._changed:
                await self._changed.wait_for(lambda: self._published != seen)
        except TimeoutError:
            return self._published
        return self._published

    async def wait_for_named(
        self, name: str, min_version: int, version: int | None, wait_s: float | None
    ) -> NamedVersions:
        """Returns what is current once the policy is at least at `min_version` and, if given, exactly at `version`.

        Raises:
            PolicyUnknown: it is not served, or no longer.
            PolicyNotCurrent: as `CurrentVersion.wait_for` does.
        """
        await self.served(name).current.wait_for(min_version, version, wait_s)
        self.served(name)
        return self._published

    def served(self, name: str) -> Policy:
        """The policy of this name; raises `PolicyUnknown` unless it is served."""
        served, policy = self._served_numbers(), self._named.get(name)
        if policy is not None and name in served:
            return policy
        labels = ", ".join(label_of(each, number) for each, number in sorted(served.items()))
        known = f"there are {labels}" if served else "there are none"
        message = f"there is no policy of this name; {known}"
        if policy is not None and policy.current.number:
            last = policy.label(policy.current.number)
            message = f"the policy was dropped after {last}, or the full weights under it were replaced; {known}"
        raise PolicyUnknown.of("policy.name", message, name)

    async def drop(self, name: str) -> None:
        """Raises `PolicyUnknown` unless it is served."""
        self.served(name).drop()
        await self._publish()

    async def tell_rolling(self, rolling: RollingActivation | None) -> None:
        """Tells everyone who watches which replicas have the version that is being activated; `None`: it has ended."""
        if rolling != self._rolling:
            self._rolling = rolling
            await self._publish()

    async def publish(self, policy: Policy) -> None:
        """Another version of this policy is current: named ones for other full weights are dropped, and everyone who
        watches learns what is current now. The caller holds the update lease."""
        has_dropped = self._drop_outdated()
        if has_dropped or policy.name is not None:
            await self._publish()

    def _drop_outdated(self) -> bool:
        base = self.unnamed.versions.desired.full
        outdated = [
            policy for policy in self._named.values() if policy.served is not None and policy.served.base != base
        ]
        for policy in outdated:
            policy.drop()
        return bool(outdated)

    async def _publish(self) -> None:
        revision = max(time.time_ns(), self._published.revision + 1)
        self._published = NamedVersions(self._published.store, revision, self._served_numbers(), self._rolling)
        async with self._changed:
            self._changed.notify_all()

    def _served_numbers(self) -> dict[str, int]:
        return {name: policy.served.version for name, policy in self.named.items() if policy.served is not None}

    def drop_expired(self) -> None:
        self.unnamed.uploads.drop_expired()
        for name, policy in self.named.items():
            policy.uploads.drop_expired()
            self._forget_unknown(name)

    def next_expiry_s(self) -> float | None:
        expiries = (policy.uploads.next_expiry_s() for policy in (self.unnamed, *self._named.values()))
        return min((expiry for expiry in expiries if expiry is not None), default=None)
