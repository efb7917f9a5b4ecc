"""The versions of the policy: their numbers, which one every replica should hold, and how long they are kept.

Guarantees: versions are numbered upward and never change; a version that did not become current is removed again, and
its number is free; of a version that is listed with weights, the full weights can be given: a version that another one
is stored as a delta of is kept as long as that one, until the store has made its full weights.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import NamedTuple

from deployments.policy.failures import PolicyNotCurrent, VersionRefused, VersionUnknown, WeightsRefused
from deployments.policy.replicas.commands import LoadedWeights
from deployments.policy.versions.assembly import BASE_REMOVED
from deployments.policy.versions.current_version import CurrentVersion
from deployments.policy.versions.full_weights import INITIAL, DeltaChains, InitialVersion
from deployments.policy.versions.version_store import KnownVersions, StoredVersion, VersionStore
from rollout_client.contract.policy import PushOptions, VersionInfo
from rollout_client.contract.problems import FieldProblem

OTHER_BASE = (
    "the adapter was trained on these full weights, and others are current, version {full}: make its own current first "
    "(POST /policy/rollback), or train it on those"
)


class FullWeights(NamedTuple):
    """The identity of full weights, also once their version is no longer stored."""

    version: int
    checksum: str | None = None


class VersionHistory:
    """The versions of one policy.

    Args:
        max_step: how far the number of a new version may be above the newest one.
        run: the training run that makes new versions.
    """

    def __init__(
        self, store: VersionStore, initial: InitialVersion, current: CurrentVersion, max_step: int, run: str
    ) -> None:
        self.store = store
        self.initial = initial
        self.chains = DeltaChains(store, initial)
        """How the full weights of versions that are stored as deltas are made."""
        self._current = current
        self._max_step = max_step
        self._run = run
        self._updating_to: int | None = None
        bases = [info.base for info in store.versions() if info.kind == "adapter" and info.base is not None]
        self.last_adapter_base = FullWeights(bases[-1]) if bases else None
        """On which the last adapter became current, also once others have taken their place; a store that starts knows
        of the adapters that are stored."""

    @property
    def updating_to(self) -> int | None:
        """The version that an update under way loads into the replicas."""
        return self._updating_to

    @property
    def desired(self) -> LoadedWeights:
        """The versions that every replica should hold: the current full weights and the current adapter, if any."""
        current = self.store.current()
        if current == 0:
            return LoadedWeights()
        info = self.store.info(current)
        return LoadedWeights(info.base or 0, current) if info.kind == "adapter" else LoadedWeights(current)

    def list(self) -> list[VersionInfo]:
        """In order of their numbers, version 0 first."""
        public = [
            VersionInfo(**{name: getattr(stored, name) for name in VersionInfo.model_fields})
            for stored in self.store.versions()
        ]
        return [INITIAL, *public]

    def uploaded(self, version: int, digest: str) -> StoredVersion | None:
        """The version, if it is or was current and was uploaded as bytes with this digest."""
        found = self.store.find(version)
        if found is None or version > self._current.number or found.upload_digest != digest:
            return None
        return found

    def next_number(self) -> int:
        taken = self.store.tried().loaded
        return next(number for number in count(self._newest + 1) if number not in taken)

    @property
    def has_any(self) -> bool:
        """Whether the store's folder knows of any version but the initial one."""
        return bool(self.store.current() or self.store.versions() or self.store.tried().versions)

    def known(self) -> KnownVersions:
        """The knowledge with which the versions of a replica that registers are compared."""
        return KnownVersions(
            run=self._run,
            current=self.store.current(),
            stored={info.version: info for info in self.store.versions()},
            tried={info.version: info for info in self.store.tried().versions},
        )

    def has_weights(self, version: int) -> bool:
        """False after a transfer until a replica has saved its weights, and of a version that was taken over from a
        replica until its weights are back."""
        return bool(self.chains.links(version))

    @property
    def has_desired(self) -> bool:
        """Whether the service has the weights that every replica should hold."""
        desired = self.desired
        return self.has_weights(desired.full) and self.has_weights(desired.version)

    def take_over(self, held: Sequence[StoredVersion]) -> None:
        """Records the versions that a replica holds, without weights, and makes the last one current on disk.

        Call it from a thread.
        """
        stored = {info.version for info in self.store.versions()}
        for info in held:
            if info.version not in stored:
                self.store.add(info.model_copy(update={"run": self._run}), None)
        self.store.make_current(held[-1].version)

    def is_taken(self, version: int) -> bool:
        """Whether the number is not above those of the current version and of a running update."""
        return version <= self._newest

    def refuse_taken(self, version: int) -> None:
        """Raises `VersionRefused` if the number is taken, or more than `max_step` above the newest one."""
        newest = self._newest
        if version <= newest:
            message = f"versions are numbered upward and {newest} is taken; the next is {newest + 1}"
        elif version > newest + self._max_step:
            message = (
                f"it is too far above the newest version, {newest}: take {newest + 1} or at most "
                f"{newest + self._max_step}, or raise policy.max_version_step"
            )
        else:
            return
        raise VersionRefused.of("version", message, version)

    def _refuse_tried(self, info: StoredVersion) -> None:
        tried = self.store.tried()
        other = next((other for other in tried.versions if other.version == info.version), None)
        if other is not None and info.version in tried.loaded and other.checksum != info.checksum:
            message = (
                "a replica has loaded other weights under this number, which did not become current; the next is "
                f"{self.next_number()}"
            )
            raise VersionRefused.of("version", message, info.version)

    @property
    def _newest(self) -> int:
        return max(self._current.number, self._updating_to or 0)

    @asynccontextmanager
    async def adding(self, info: StoredVersion, file: Path) -> AsyncIterator[None]:
        """Stores the version for the block, which may make it current; otherwise it is removed at the end.

        Raises:
            VersionRefused: the number is taken or too far ahead.
            WeightsRefused: the base of a delta was removed meanwhile.
        """
        self.refuse_taken(info.version)
        if info.delta_bytes is not None and not self.has_weights(info.base or 0):
            raise WeightsRefused.of("base", BASE_REMOVED, info.base)
        self._refuse_tried(info)
        self._updating_to = info.version
        try:
            await asyncio.to_thread(self.store.add, info.model_copy(update={"run": self._run}), file)
            yield
        finally:
            self._updating_to = None
            self._remove_unless_current(info.version)

    def add_without_weights(self, info: StoredVersion) -> None:
        """Stores a version whose weights only the replicas have, and makes it current."""
        try:
            self.store.add(info.model_copy(update={"run": self._run}), None)
            self.store.make_current(info.version)
        finally:
            self._remove_unless_current(info.version)

    async def publish(self) -> int:
        """Publishes and returns the version that is current on disk."""
        current = self.store.current()
        if current == self._updating_to:
            self._updating_to = None
        await self._current.publish(current)
        return current

    def keep_newest(self, full_versions: int, needed: Iterable[int]) -> None:
        """Removes all versions except the newest `full_versions` with full weights, those that are `needed`, and
        those that one of them is stored as a delta of.
        """
        full = [
            stored.version
            for stored in self.store.versions()
            if stored.kind in ("full", "partial", "delta")
            or (stored.kind == "transfer" and self.has_weights(stored.version))
        ]
        kept = {*needed, *full[-full_versions:]}
        self.store.keep_only(kept.union(*map(self.chains.links, kept)))

    def info(self, version: int) -> VersionInfo:
        """Raises `VersionUnknown`."""
        return self.store.info(version) if version else INITIAL

    def record(self, version: int) -> str | None:
        """The record of the version, for replicas to keep with its weights; `None` for the initial version.

        Raises:
            VersionUnknown: it is not stored.
        """
        return self.store.info(version).model_dump_json() if version else None

    def checksum(self, version: int) -> str:
        """The `Checksum` of a version that is stored with its weights; call it from a thread."""
        return str(self.store.info(version).checksum) if version else self.initial.checksum

    def place(self, version: int) -> Path:
        """Where the weights of the version are, or will be once `file` was called. Call it from a thread."""
        return self.store.weights(version) if version else self.initial.file()

    def file(self, version: int) -> Path:
        """Documented in `DeltaChains.file`."""
        return self.chains.file(version)

    def delta_file(self, info: StoredVersion) -> Path | None:
        """The changes of a version that is stored as a delta; `None` of all others."""
        path = self.store.delta(info.version)
        return path if info.delta_bytes is not None and path.exists() else None

    def full_bytes(self, version: int) -> int:
        """Size of the full weights of a version that has them, as one file. Call it from a thread."""
        return self.store.info(version).size_bytes if version else self.initial.file().stat().st_size

    def link_weights(self, version: int, path: Path) -> VersionInfo:
        """Makes `path` a hard link of the version's weights, for the same policy again. Call it from a thread.

        Raises:
            VersionUnknown: its weights are not stored here, or no longer.
            WeightsRefused: it is an adapter for other full weights than the current ones.
        """
        stored = [0, *(info.version for info in self.store.versions() if self.has_weights(info.version))]
        if version not in stored:
            message = f"its weights are not stored here, or no longer; stored are {', '.join(map(str, stored))}"
            raise VersionUnknown.of("to", message, version)
        info = self.info(version)
        if info.kind == "adapter" and not self._are_same(info.base or 0, self.desired.full):
            message = (
                f"it is an adapter for the weights of version {info.base or 0}, and those of version "
                f"{self.desired.full} are current; roll back to {info.base or 0} first"
            )
            raise WeightsRefused.of("to", message, version)
        os.link(self.file(version), path)
        return info

    def _are_same(self, one: int, other: int) -> bool:
        one, other = self._origin(one), self._origin(other)
        if one == other:
            return True
        checksums = [info.checksum for info in map(self.store.find, (one, other)) if info is not None]
        return len(checksums) == 2 and checksums[0] == checksums[1] is not None

    def _origin(self, version: int) -> int:
        """The version whose weights it has again, if it is a rollback."""
        while (info := self.store.find(version)) is not None and info.rollback_of is not None:
            version = info.rollback_of
        return version

    @property
    def full_weights(self) -> FullWeights:
        """Those that are current."""
        full = self.desired.full
        info = self.store.find(full)
        return FullWeights(full, None if info is None else info.checksum)

    def refuse_other_base(self, options: PushOptions) -> None:
        """Raises `PolicyNotCurrent` unless the current full weights are those that an adapter was trained on.

        Call it from a thread.
        """
        full, problem = self.desired.full, None
        if options.base is not None and not self._are_same(options.base, full):
            problem = FieldProblem(field="base", message=OTHER_BASE.format(full=full), value=options.base)
        elif options.base_checksum is not None and options.base_checksum != (found := self.checksum(full)):
            message = f"{OTHER_BASE.format(full=full)}; their checksum is {found}"
            problem = FieldProblem(field="base_checksum", message=message, value=options.base_checksum)
        if problem is not None:
            raise PolicyNotCurrent(problem)

    def warnings_of_base(self, before: FullWeights | None, options: PushOptions) -> Sequence[str]:
        """Warns the sender of an adapter if the one before was served on other full weights than the current.

        Args:
            before: on which that was; `None` without an adapter before.
            options: if they demand a base, the sender knows which it is.
        """
        full, is_demanded = self.full_weights, (options.base, options.base_checksum) != (None, None)
        if is_demanded or before is None or self._are_same(before.version, full.version):
            return []
        if before.checksum is not None and before.checksum == full.checksum:
            return []
        return [
            f"The adapter is served on the full weights of version {full.version}, and the one before it was on "
            f"version {before.version}. If it was trained on {before.version}, roll back to that version and push it "
            "again."
        ]

    def delta_base(self, version: int | None) -> int:
        """The version that a delta changes, or that completes partial weights.

        Raises:
            WeightsRefused: the delta names no base, or one without full weights here.
            VersionUnknown: the base is not stored, or no longer.
        """
        if version is None:
            raise WeightsRefused.of("base", "a delta must say which version it changes")
        if self.info(version).kind == "adapter" or not self.has_weights(version):
            message = "the version has no full weights here"
            raise WeightsRefused.of("base", message, version)
        return version

    def _remove_unless_current(self, version: int) -> None:
        if self.store.current() != version:
            self.store.give_up(version)
