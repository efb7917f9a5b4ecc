"""One push: a complete upload, a checkpoint at a path or URL, or a stored version again, which every replica loads.

Guarantees: a push goes on if its caller goes away; the same push sent again, while the first is under way or after it,
has the same result; a version that is refused leaves the current one serving, and its number is free again; an upload
that is refused stays for another try, except one that was damaged on its way and the first one of a named policy.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from deployments.policy.failures import ChunkDamaged, PolicyFailure
from deployments.policy.policies import Policy
from deployments.policy.preparation import PreparedVersion, VersionPreparation
from deployments.policy.published import PublishedChain
from deployments.policy.update import Updates
from rollout_client.contract.policy import PolicyUpdate, PushOptions, SwitchOptions

Prepare = Callable[[Path], PreparedVersion]
"""Prepares a version in a folder; called in a thread."""
logger = logging.getLogger("rollout_service.policy")


class Pushes:
    """Runs pushes: prepares the version, and has the replicas load it.

    Args:
        checkpoint_roots: as in `PolicySettings`.
    """

    def __init__(self, updates: Updates, checkpoint_roots: Sequence[str]) -> None:
        self._updates = updates
        self._checkpoint_roots = checkpoint_roots

    async def complete_upload(
        self, policy: Policy, version: int, sender: str, options: PushOptions, is_zstd: bool, digest: str | None
    ) -> PolicyUpdate:
        """Pushes the upload of `version`, all of which has arrived.

        Args:
            digest: the `weights_digest` of the upload, as its sender says.

        Raises:
            PolicyFailure: the current version goes on serving.
        """
        policy.pushes.refuse_active(version)
        policy.uploads.refuse_overtaken(version, sender)

        async def push() -> PolicyUpdate:
            try:
                upload = policy.uploads.path(version)
                prepare = partial(self._preparation(policy).from_upload, version, options, upload, is_zstd, digest)
                update = await self._push(policy, version, options, prepare)
            except ChunkDamaged:
                policy.uploads.drop(version)
                raise
            except PolicyFailure as failure:
                if policy.name is not None and policy.versions.newest == 0:
                    # Nobody knows the policy yet: the upload alone would make one of it.
                    policy.uploads.drop(version)
                else:
                    policy.uploads.keep_refused(version, str(failure))
                raise
            policy.uploads.drop(version)
            return update

        return await policy.pushes.run(version, digest, self._recorded(policy, version, push()))

    async def load_checkpoint(
        self, policy: Policy, version: int, checkpoint: str, options: PushOptions
    ) -> PolicyUpdate:
        """Pushes the checkpoint at a path or URL under the configured roots; raises as `complete_upload` does."""
        prepare = partial(self._preparation(policy).from_checkpoint, version, options, checkpoint)
        return await self._run_once(policy, version, checkpoint, options, prepare)

    async def take_published(
        self, policy: Policy, chain: PublishedChain, folder: str, options: PushOptions
    ) -> PolicyUpdate:
        """Pushes a version of the followed `folder`; raises as `complete_upload` does, and `SourceRefused`."""
        prepare = partial(self._preparation(policy).from_publication, chain, options, folder)
        return await self._run_once(policy, chain.version, chain.source, options, prepare)

    async def roll_back(
        self, policy: Policy, to: int, version: int | None, options: SwitchOptions, source: Policy
    ) -> PolicyUpdate:
        """Makes the stored weights of version `to` of `source` a new version of `policy`, by default the next number.

        Raises:
            VersionUnknown: its weights are not stored here, or no longer.
            WeightsRefused: `policy` is a named one, and the version is no adapter for the current full weights.
            PolicyFailure: as `complete_upload` does.
        """
        if version is not None:
            return await self._roll_back(policy, to, version, options, source)
        # One after the other: of two that run together the one with the higher number may end first.
        async with policy.numbering:
            return await self._roll_back(policy, to, policy.next_number(), options, source)

    async def _roll_back(
        self, policy: Policy, to: int, version: int, options: SwitchOptions, source: Policy
    ) -> PolicyUpdate:
        prepare = partial(self._preparation(policy).from_stored, version, to, source.versions)
        push_options = PushOptions(**options.model_dump())
        return await self._run_once(policy, version, f"rollback to {to}", push_options, prepare)

    async def repeated_update(self, policy: Policy, version: int, digest: str | None) -> PolicyUpdate | None:
        """The result of an earlier push of the same upload, whose answer may have been lost; `None` if there was none.

        Raises:
            PolicyFailure: as the earlier push does, which is still under way.
        """
        if digest is None:
            return None
        if (update := await policy.pushes.result_of_same(version, digest)) is not None:
            return update
        stored = policy.uploaded(version, digest)
        if stored is None:
            return None
        if policy.last_update is not None and policy.last_update.version == version:
            return policy.last_update
        return PolicyUpdate(
            version=version,
            name=policy.name,
            checksum=stored.checksum,
            replicas=[],
            keeps_prefix_cache=stored.keeps_prefix_cache,
            base=stored.base if stored.kind == "adapter" else None,
        )

    def _preparation(self, policy: Policy) -> VersionPreparation:
        return VersionPreparation(policy.versions, self._checkpoint_roots)

    async def _push(self, policy: Policy, version: int, options: PushOptions, prepare: Prepare) -> PolicyUpdate:
        self._updates.refuse(policy, version, options)
        with policy.versions.workspace(version) as folder:
            prepared = await asyncio.to_thread(prepare, folder)
            return await self._updates.update(policy, prepared.info, prepared.file, options)

    async def _run_once(
        self, policy: Policy, version: int, content: str, options: PushOptions, prepare: Prepare
    ) -> PolicyUpdate:
        """Runs the push, or waits for the same one if that is under way."""
        if (update := await policy.pushes.result_of_same(version, content)) is not None:
            return update
        policy.pushes.refuse_active(version)
        push = self._push(policy, version, options, prepare)
        return await policy.pushes.run(version, content, self._recorded(policy, version, push))

    async def _recorded(self, policy: Policy, version: int, push: Coroutine[Any, Any, PolicyUpdate]) -> PolicyUpdate:
        label, extra = policy.label(version), policy.log_extra(version)
        try:
            policy.last_update = update = await push
            for warning in update.warnings:
                logger.warning("Version %s: %s", label, warning, extra=extra)
        except PolicyFailure as failure:
            logger.info("Version %s is refused: %s", label, failure, extra=extra)
            raise
        except Exception as error:
            logger.warning("The update to version %s failed.", label, exc_info=error, extra=extra)
            raise
        return update
