"""Takes the versions that a trainer publishes in a folder: each is a push whose sender is the folder."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from ray.serve import metrics

from deployments.policy.disk_delta import DeltaRefused
from deployments.policy.failures import PolicyFailure, SourceRefused, UpdateUnderWay, VersionUntried
from deployments.policy.policies import Policy
from deployments.policy.published import HeldVersions, Publication, Publications, PublishedChain, PublishedFolder
from rollout_client.contract.policy import FollowState, PolicyUpdate, PushOptions, RefusedPublication

if TYPE_CHECKING:
    from deployments.policy.settings import FollowSettings

Push = Callable[[PublishedChain, str, PushOptions], Awaitable[PolicyUpdate]]
CAN_PASS = (SourceRefused, UpdateUnderWay, VersionUntried)
"""Refusals that say nothing about the version: it is tried again."""
logger = logging.getLogger("rollout_service.policy")


class FolderFollower:
    """Looks at the folder every `poll_s` seconds, for the life of the policy store.

    Args:
        policy: the one without a name.
        push: takes a version of the folder. Raises `PolicyFailure`.
    """

    def __init__(self, settings: "FollowSettings", policy: Policy, push: Push) -> None:
        self._settings = settings
        self._policy = policy
        self._push = push
        self._folder = PublishedFolder(settings.folder)
        self._publications = Publications(takes_deltas=settings.format == "miles_disk_delta")
        self._taken = 0
        """The newest version that has come from the folder; it may be stored no longer."""
        self._unreadable: str | None = None
        """Why the folder, or a file of the version that is next, could not be read at the last look."""
        self._told: str | None = None
        """The obstacle that was logged last."""
        # Serve adds the replica's id to each metric.
        self._refused = metrics.Counter(
            "rollout_published_versions_refused", description="Versions of the followed folder that were refused."
        )
        self._behind = metrics.Gauge(
            "rollout_published_versions_behind",
            description="How far the current version is behind the newest number in the followed folder.",
        )

    async def run(self) -> None:
        while True:
            if not await self._take_next():
                await asyncio.sleep(self._settings.poll_s)

    def state(self) -> FollowState:
        state = self._publications.state(self._settings.folder, self._held())
        return state if self._unreadable is None else state.model_copy(update={"waiting": self._unreadable})

    async def _take_next(self) -> bool:
        """Takes the next version, if there is one; returns whether there was."""
        held = await asyncio.to_thread(self._held)
        try:
            found, newest = await asyncio.to_thread(self._folder.look, max(held.with_weights))
        except Exception as error:  # noqa: BLE001 - each file system of fsspec raises errors of its own
            self._note_unreadable(f"the folder cannot be read: {type(error).__name__}: {error}")
            return False
        self._unreadable = None
        for refused in self._publications.observe(found, newest):
            self._tell_refused(refused)
        self._behind.set(max(newest - held.current, 0))
        chain = self._publications.next(held)
        if chain is None:
            self._tell(self._publications.waiting, logging.INFO)
            return False
        return await self._take(chain)

    async def _take(self, chain: PublishedChain) -> bool:
        options = PushOptions(mode=self._settings.mode)
        try:
            await self._push(chain, self._settings.folder, options)
        except CAN_PASS as failure:
            self._note_unreadable(f"version {chain.version}: {failure}")
            return False
        except DeltaRefused as refusal:
            broken = next(link for link in chain.links if link.version == refusal.version)
            self._refuse(broken, str(refusal), is_broken=True)
        except PolicyFailure as refusal:
            self._refuse(chain.links[-1], str(refusal), is_broken=False)
        except Exception as error:  # noqa: BLE001 - was logged with its traceback, and can pass
            self._note_unreadable(f"version {chain.version}: {type(error).__name__}: {error}")
            return False
        return True

    def _held(self) -> HeldVersions:
        versions = self._policy.versions
        taken = [info.version for info in versions.all if self._is_ours(info.source)]
        with_weights = [0, *(version for version in taken if versions.has_weights(version))]
        self._taken = max([self._taken, *taken])
        return HeldVersions(self._policy.current, self._taken, with_weights)

    def _is_ours(self, source: str | None) -> bool:
        return source is not None and source.startswith(f"{self._settings.folder.rstrip('/')}/")

    def _refuse(self, publication: Publication, reason: str, is_broken: bool) -> None:
        self._tell_refused(self._publications.refuse(publication, reason, is_broken))

    def _tell_refused(self, refused: RefusedPublication) -> None:
        self._refused.inc()
        place, extra = self._settings.folder, {"version": refused.version}
        logger.error("Version %d of %s is refused: %s", refused.version, place, refused.reason, extra=extra)

    def _note_unreadable(self, why: str) -> None:
        self._unreadable = why
        self._tell(why)

    def _tell(self, obstacle: str | None, level: int = logging.WARNING) -> None:
        """Logs it once."""
        if obstacle is not None and obstacle != self._told:
            logger.log(level, "%s is not followed up to its newest version: %s", self._settings.folder, obstacle)
        self._told = obstacle
