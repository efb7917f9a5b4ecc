"""The policies of a store: one without a name, and named ones, adapters over its full weights, several at a time.

The policy without a name has full weights, and perhaps an adapter for them. A named policy has adapters alone, which
are served beside the full weights, in a folder of its own (`names/run-b/`) with the same layout.

Guarantees: the number that is published is the one on disk, once the version is loaded by the replicas that took part
in its update; versions of a policy are numbered upward for ever, also where it was dropped in between; a named policy
is served only over the full weights that it was pushed for: when others become current, it is dropped; everyone who
waits learns of each change; there is at most one push of a version at a time, and the same push sent again gets the
result of the first.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from deployments.policy.failures import PolicyNotCurrent, PolicyUnknown
from deployments.policy.uploads import Uploads
from deployments.policy.versions import InitialVersion, Version, Versions
from deployments.protocols.weight_versions import CurrentVersions, RollingActivation
from deployments.rpc.background_tasks import BackgroundTasks
from rollout_client.contract.base import label_of
from rollout_client.contract.policy import NamedPolicyState, PolicyUpdate, ReplicaUpdate

if TYPE_CHECKING:
    from deployments.policy.settings import PolicySettings


LONG_POLL_S = 5.0
CLEAN_UP_EVERY_S = 10.0
logger = logging.getLogger("rollout_service.policy")


@dataclass(frozen=True, slots=True)
class _Push:
    content: str | None
    """Identifies the same push: the `weights_digest` that its sender says, or the checkpoint's location."""
    task: asyncio.Task[PolicyUpdate]


class Policy:
    """The policy as it is on disk.

    Args:
        name: `None` for the policy without a name.
        root: the store's folder.
        initial: version 0 of the policy without a name.
    """

    def __init__(
        self, name: str | None, root: Path, settings: "PolicySettings", initial: InitialVersion, tasks: BackgroundTasks
    ) -> None:
        folder = root if name is None else root / "names" / name
        self.name = name
        self.versions = Versions(folder, initial, root)
        self.current = self.versions.current
        """The version that new generations use, as it was published last."""
        self._tasks = tasks
        self._pushes: dict[int, _Push] = {}
        """The pushes that are under way, by version."""
        self.uploads = Uploads(self.versions, self._pushes)
        self.used_at = 0.0
        """When a call was about it last, by the clock of the event loop."""
        self.last_update: PolicyUpdate | None = None
        self._keep_versions = settings.keep_versions

    @property
    def served(self) -> Version | None:
        """The version that new generations use; `None` of a policy that was dropped, and of version 0."""
        return self.versions.find(self.current)

    @property
    def is_known(self) -> bool:
        """Whether anybody has ever begun to push it; of one whose first push was refused nothing is known again."""
        return bool(self.versions.newest or self._pushes or self.uploads.states())

    def label(self, version: int) -> str:
        return label_of(self.name, version)

    def log_extra(self, version: int) -> dict[str, Any]:
        return {"version": version if self.name is None else self.label(version)}

    def next_number(self) -> int:
        """The lowest number that the next version may have: above that of every push under way, too."""
        return max([self.versions.newest, *self._pushes]) + 1

    async def push(self, version: int, content: str | None, work: Coroutine[Any, Any, PolicyUpdate]) -> PolicyUpdate:
        """Runs `work` to its end, even if the caller is cancelled; returns or raises what it does."""
        task = self._tasks.start(work)
        self._pushes[version] = _Push(content, task)
        task.add_done_callback(lambda _: self._pushes.pop(version))
        return await asyncio.shield(task)

    async def result_of_same(self, version: int, content: str) -> PolicyUpdate | None:
        """Waits for the push of the same version and content; `None` if there is none. Raises what the push does."""
        push = self._pushes.get(version)
        if push is None or push.content != content:
            return None
        return await asyncio.shield(push.task)

    def update_to(
        self, info: Version, replicas: Sequence[ReplicaUpdate] = (), warnings: Sequence[str] = ()
    ) -> PolicyUpdate:
        """The result of a push of this version, with the outcome of each replica."""
        return PolicyUpdate(
            version=info.version,
            name=self.name,
            checksum=info.checksum,
            replicas=[*replicas],
            canary_s=max((replica.canary_s for replica in replicas), default=0.0),
            keeps_prefix_cache=info.keeps_prefix_cache,
            base=info.base if info.kind == "adapter" else None,
            warnings=[*warnings],
        )

    def remove_old_versions(self, needed: Iterable[int]) -> None:
        """Removes all but the newest versions with full weights, and those that are `needed`; named: all but one."""
        if self.name is None:
            self.versions.keep_newest(self._keep_versions, needed)
        else:
            self.versions.keep_only([self.current])

    def state(self) -> NamedPolicyState:
        """The state of a named policy."""
        served = self.served
        return NamedPolicyState(
            name=str(self.name),
            current=None if served is None else served.version,
            base=None if served is None else served.base,
            checksum=None if served is None else served.checksum,
            size_bytes=0 if served is None else served.size_bytes,
            created_at=None if served is None else served.created_at,
            next_version=self.next_number(),
            updating_to=self.versions.updating_to,
            uploads=self.uploads.states(),
        )


class PolicyRegistry:
    """All policies that are in the store's folder, and those that are pushed for the first time.

    Args: as in `Policy`.
    """

    def __init__(self, root: Path, settings: "PolicySettings", initial: InitialVersion, tasks: BackgroundTasks) -> None:
        self._open = partial(Policy, root=root, settings=settings, initial=initial, tasks=tasks)
        self.unnamed = self._open(None)
        self._named: dict[str, Policy] = {}
        """By name. All that were ever pushed; those without a version are not served."""
        self._changed = asyncio.Condition()
        for path in sorted(root.glob("names/*")):
            self.of(path.name)
        self._longest_wait_s = settings.wait_s
        self._drop_outdated()
        self._published = CurrentVersions(uuid4().hex, time.time_ns(), self._served_numbers())

    def find(self, name: str | None) -> Policy | None:
        """The policy of this name, if anything is known of it."""
        return self.unnamed if name is None else self._named.get(name)

    def of(self, name: str | None) -> Policy:
        """The policy of this name; one that is not known has neither versions nor uploads."""
        policy = self.find(name)
        if policy is None:
            policy = self._named[str(name)] = self._open(name)
        policy.used_at = asyncio.get_running_loop().time()
        return policy

    @property
    def named(self) -> dict[str, Policy]:
        """By name, in the order of their names."""
        return dict(sorted(self._named.items()))

    def take_served(self, versions: Mapping[str, int]) -> None:
        """A replica serves these versions: where the store lost its folder, their numbers are not given again."""
        for name, version in versions.items():
            self.of(name).versions.take(version)

    async def watch(self, seen: CurrentVersions | None) -> CurrentVersions:
        """The current versions, as soon as they differ from `seen`, or unchanged after `LONG_POLL_S`."""
        return await self._published_when(lambda: self._published != seen, LONG_POLL_S)

    async def wait_for(
        self, name: str | None, min_version: int, version: int | None, wait_s: float | None, takes_offered: bool = False
    ) -> CurrentVersions:
        """The current versions once that of one policy is at least `min_version` and, if given, exactly `version`.

        Args:
            wait_s: seconds; as long as the service allows if `None` or longer than that.
            takes_offered: a minimum is also met once some replica has the version in a rolling activation.

        Raises:
            PolicyUnknown: the policy is not served, or no longer.
            PolicyNotCurrent: this did not happen within `wait_s`, or can no longer happen.
        """
        policy = self.served(name)
        wait_s = self._longest_wait_s if wait_s is None else min(wait_s, self._longest_wait_s)
        awaited, takes_offered = max(min_version, version or 0), takes_offered and (name, version) == (None, None)

        def is_there() -> bool:
            rolling = self._published.rolling if takes_offered else None
            return max(policy.current, 0 if rolling is None else rolling.version) >= awaited

        await self._published_when(is_there, wait_s)
        if not is_there() or version not in (None, policy.current):
            field, value = ("policy.min_version", min_version) if version is None else ("policy.version", version)
            reason = "a newer one has taken its place" if is_there() else f"it is not there after {wait_s:g} s"
            raise PolicyNotCurrent.of(field, f"{reason}; version {policy.current} is current", value)
        self.served(name)
        return self._published

    async def _published_when(self, condition: Callable[[], bool], wait_s: float) -> CurrentVersions:
        """The current versions as soon as `condition` holds, or after `wait_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s), self._changed:
                await self._changed.wait_for(condition)
        return self._published

    def served(self, name: str | None) -> Policy:
        """The policy of this name; raises `PolicyUnknown` unless it is served."""
        policy = self.find(name)
        if policy is not None and (name is None or policy.served is not None):
            return policy
        served = [each.label(each.current) for each in self.named.values() if each.served is not None]
        known = f"there are {', '.join(served)}" if served else "there are none"
        message = f"there is no policy of this name; {known}"
        if policy is not None and policy.versions.newest:
            last = policy.label(policy.versions.newest)
            message = f"the policy was dropped after {last}, or the full weights under it were replaced; {known}"
        raise PolicyUnknown.of("policy.name", message, name)

    async def drop(self, name: str) -> None:
        """Removes all versions, but the number of the last one stays known. Raises `PolicyUnknown` unless served."""
        self.served(name).versions.keep_only(())
        await self._tell()

    async def publish(self, policy: Policy) -> None:
        """Serves the version of the policy that is current on disk from now on, and ends a rolling activation.

        Named policies for other full weights are dropped. The caller holds the update lease.
        """
        policy.versions.note_published()
        policy.current = policy.versions.current
        policy.uploads.drop_up_to(policy.current)
        self._drop_outdated()
        await self._tell()

    async def tell_rolling(self, version: int, replicas: frozenset[str]) -> None:
        """Tells everyone who watches which replicas have the version that is being activated, and is not current."""
        await self._tell(RollingActivation(self.unnamed.current, version, replicas))

    def _drop_outdated(self) -> None:
        base = self.unnamed.versions.desired.full
        for policy in self._named.values():
            if policy.served is not None and policy.served.base != base:
                policy.versions.keep_only(())

    async def _tell(self, rolling: RollingActivation | None = None) -> None:
        revision = max(time.time_ns(), self._published.revision + 1)
        self._published = CurrentVersions(self._published.store, revision, self._served_numbers(), rolling)
        async with self._changed:
            self._changed.notify_all()

    def _served_numbers(self) -> dict[str, int]:
        """By name; that of the policy without a name is under ''."""
        named = {name: policy.current for name, policy in self.named.items() if policy.served is not None}
        return {"": self.unnamed.current, **named}

    async def run(self) -> None:
        """Cleans up every `CLEAN_UP_EVERY_S` seconds, for ever."""
        while True:
            await self.clean_up()
            await asyncio.sleep(CLEAN_UP_EVERY_S)

    async def clean_up(self) -> None:
        """Drops the uploads that have expired and the policies of which nothing is known, and deletes what was
        discarded."""
        try:
            for policy in [self.unnamed, *self.named.values()]:
                policy.uploads.drop_expired()
                unused_s = asyncio.get_running_loop().time() - policy.used_at
                if policy.name is not None and not policy.is_known and unused_s >= CLEAN_UP_EVERY_S:
                    del self._named[policy.name]
                    policy.versions.trash.discard(policy.versions.folder)
            await asyncio.to_thread(self.unnamed.versions.trash.empty)
        except OSError as error:
            logger.warning("Files of the policy store could not be removed.", exc_info=error)
