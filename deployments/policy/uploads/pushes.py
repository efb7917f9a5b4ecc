"""One push: a complete upload, a checkpoint at a path or URL, or a stored version again, which every replica loads.

Guarantees: a push goes on if its caller goes away; the same push sent again, while the first is under way or after it,
has the same result; a version that is refused leaves the current one serving, and its number is free again; an upload
that is refused stays for another try, except one that was damaged on its way and the first one of a named policy.
"""

import asyncio
import logging
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Protocol

from deployments.policy.failures import ChunkDamaged, PolicyFailure
from deployments.policy.uploads.preparation import VersionPreparation
from deployments.policy.uploads.uploads import ActivePushes, Uploads
from deployments.policy.versions.housekeeping import Housekeeping
from deployments.policy.versions.version_history import VersionHistory
from deployments.policy.versions.version_store import StoredVersion
from rollout_client.contract.base import label_of
from rollout_client.contract.policy import PolicyUpdate, PushOptions, SwitchOptions


class Updates(Protocol):
    def refuse(self, version: int, options: PushOptions) -> None:
        """Raises what `update` would raise at once, for callers that have to prepare the version first."""
        ...

    async def update(self, info: StoredVersion, file: Path, options: PushOptions) -> PolicyUpdate:
        """Makes the version current and returns once every replica serves it; raises `PolicyFailure`."""
        ...


logger = logging.getLogger("rollout_service.policy")


class Pushes:
    def __init__(
        self,
        active: ActivePushes,
        uploads: Uploads,
        preparation: VersionPreparation,
        versions: VersionHistory,
        updater: Updates,
        housekeeping: Housekeeping,
        name: str | None = None,
    ) -> None:
        """Args: `name` is that of the policy; `None` for the one without."""
        self._active = active
        self._uploads = uploads
        self._preparation = preparation
        self._versions = versions
        self._updater = updater
        self._housekeeping = housekeeping
        self._name = name
        self._numbering = asyncio.Lock()
        self._last_update: PolicyUpdate | None = None

    async def complete_upload(
        self, version: int, sender: str, options: PushOptions, is_zstd: bool, digest: str | None
    ) -> PolicyUpdate:
        """Pushes the upload of `version`, all of which has arrived.

        Args:
            digest: the `weights_digest` of the upload, as its sender says.

        Raises:
            PolicyFailure: the current version goes on serving.
        """
        self._active.refuse_active(version)
        self._uploads.refuse_overtaken(version, sender)

        async def push() -> PolicyUpdate:
            self._updater.refuse(version, options)
            upload = self._uploads.path(version)
            async with self._preparation.from_upload(version, options, upload, is_zstd, digest) as prepared:
                return await self._updater.update(prepared.info, prepared.file, options)

        async def push_and_settle_upload() -> PolicyUpdate:
            try:
                update = await push()
            except ChunkDamaged:
                self._uploads.drop(version)
                raise
            except PolicyFailure as failure:
                if self._name is not None and self._versions.current_on_disk == 0:
                    # Nobody knows the policy yet: the upload alone would make one of it.
                    self._uploads.drop(version)
                else:
                    self._uploads.keep_refused(version, str(failure))
                raise
            self._uploads.drop(version)
            return update

        return await self._run(version, digest, push_and_settle_upload())

    async def load_checkpoint(self, version: int, checkpoint: str, options: PushOptions) -> PolicyUpdate:
        """Pushes the checkpoint at a path or URL under the configured roots; raises as `complete_upload` does."""
        if (update := await self._active.result_of_same(version, checkpoint)) is not None:
            return update
        self._active.refuse_active(version)

        async def push() -> PolicyUpdate:
            self._updater.refuse(version, options)
            async with self._preparation.from_checkpoint(version, options, checkpoint) as prepared:
                return await self._updater.update(prepared.info, prepared.file, options)

        return await self._run(version, checkpoint, push())

    async def roll_back(self, to: int, version: int | None, options: SwitchOptions) -> PolicyUpdate:
        """Makes the stored weights of version `to` a new version, by default the next number.

        Raises:
            VersionUnknown: its weights are not stored here, or no longer.
            PolicyFailure: as `complete_upload` does.
        """
        if version is not None:
            return await self._roll_back(to, version, options)
        # One after the other: of two that run together the one with the higher number may end first.
        async with self._numbering:
            return await self._roll_back(to, self.next_number(), options)

    async def _roll_back(self, to: int, number: int, options: SwitchOptions) -> PolicyUpdate:
        content = f"rollback to {to}"
        if (update := await self._active.result_of_same(number, content)) is not None:
            return update
        self._active.refuse_active(number)
        push_options = PushOptions(**options.model_dump())

        async def push() -> PolicyUpdate:
            self._updater.refuse(number, push_options)
            async with self._preparation.from_stored(number, to) as prepared:
                return await self._updater.update(prepared.info, prepared.file, push_options)

        return await self._run(number, content, push())

    @property
    def is_under_way(self) -> bool:
        return self._active.are_running

    def next_number(self) -> int:
        """The lowest number that the next version may have: above that of every push under way, too."""
        return max([self._versions.next_number(), *(version + 1 for version in self._active)])

    async def repeated_update(self, version: int, digest: str | None) -> PolicyUpdate | None:
        """The result of an earlier push of the same upload, whose answer may have been lost; `None` if there was none.

        Raises:
            PolicyFailure: as the earlier push does, which is still under way.
        """
        if digest is None:
            return None
        if (update := await self._active.result_of_same(version, digest)) is not None:
            return update
        stored = self._versions.uploaded(version, digest)
        if stored is None:
            return None
        if self._last_update is not None and self._last_update.version == version:
            return self._last_update
        return PolicyUpdate(
            version=version,
            name=self._name,
            checksum=stored.checksum,
            replicas=[],
            keeps_prefix_cache=stored.keeps_prefix_cache,
            base=stored.base if stored.kind == "adapter" else None,
        )

    async def _run(self, version: int, content: str | None, push: Coroutine[Any, Any, PolicyUpdate]) -> PolicyUpdate:
        return await self._active.run(version, content, self._recorded(version, push))

    async def _recorded(self, version: int, push: Coroutine[Any, Any, PolicyUpdate]) -> PolicyUpdate:
        label = label_of(self._name, version)
        extra = {"version": version if self._name is None else label}
        try:
            self._last_update = await push
            for warning in self._last_update.warnings:
                logger.warning("Version %s: %s", label, warning, extra=extra)
        except PolicyFailure as failure:
            logger.info("Version %s is refused: %s", label, failure, extra=extra)
            raise
        except Exception as error:
            logger.warning("The update to version %s failed.", label, exc_info=error, extra=extra)
            raise
        finally:
            self._housekeeping.wake()
        return self._last_update
