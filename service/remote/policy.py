"""The current weight versions as one ingress replica knows them. Server half: `deployments/policy/store.py`."""

import logging
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from deployments.failures import PolicyStoreLost
from deployments.policy.failures import PolicyUnknown
from deployments.protocols.weight_versions import CurrentVersions, RollingActivation
from deployments.rpc.background_tasks import until_back
from rollout_client.contract.base import NAME, PolicyDemand
from rollout_client.contract.policy import FollowState
from service.rollouts.staleness import OnVersion, VersionFeed

if TYPE_CHECKING:
    from deployments.policy.store import PolicyStore

OnRolling = Callable[[RollingActivation | None], None]
logger = logging.getLogger("rollout_service.remote")

RETRY_WATCH_AFTER_S = 0.5


class RemotePolicy(VersionFeed):
    """Knows the current versions, so that a rollout whose demand is already met makes no call.

    Args:
        follows_folder: whether the store takes versions from a folder.
        on_rolling: called when a replica has changed in a rolling activation, and with `None` when all have.
    """

    def __init__(
        self, store: "PolicyStore", follows_folder: bool = False, on_rolling: OnRolling = lambda _: None
    ) -> None:
        self.store = store
        self._on_rolling = on_rolling
        self._follows_folder = follows_folder
        self._known: CurrentVersions | None = None
        self._subscribers: dict[object, tuple[OnVersion, str]] = {}

    @property
    def version(self) -> int | None:
        """The current version of the policy without a name; `None` until the store has told one."""
        return self.current(None)

    def current(self, policy: str | None) -> int | None:
        """The current version of a policy as this replica knows it; `None` if none is known."""
        return self.known_versions.get(policy or "")

    @property
    def known_versions(self) -> Mapping[str, int]:
        """The current version of each policy as this replica knows it, by name; that without a name is under ''."""
        return {} if self._known is None else self._known.versions

    @property
    def served_versions(self) -> Mapping[str, int]:
        """As `known_versions`, with that which some replica has already in a rolling activation."""
        return self.known_versions if not self._offered else {**self.known_versions, "": self._offered}

    def note(self, told: CurrentVersions) -> None:
        """Records the current versions, as the store has told them."""
        before, known_before = self._known, self.known_versions
        if before is not None and told.is_older_than(before):
            return
        self._known = told
        rolling_before = None if before is None else before.rolling
        if told.rolling != rolling_before or (known_before and told.versions.get("") != known_before.get("")):
            self._on_rolling(told.rolling)
        for name in known_before.keys() | told.versions.keys():
            if (version := told.versions.get(name)) != known_before.get(name):
                self._tell(name, version)

    def _tell(self, policy: str, version: int | None) -> None:
        for on_version, name in tuple(self._subscribers.values()):
            if name == policy:
                try:
                    on_version(version)
                except Exception:
                    # The others, and whoever asked for the version, need it all the same.
                    logger.exception(
                        "A subscriber did not take version %s of the policy %s.", version, policy or "without a name"
                    )

    def subscribe(self, on_version: OnVersion, policy: str | None = None) -> Callable[[], None]:
        subscription = object()
        self._subscribers[subscription] = on_version, policy or ""
        if self._known is not None:
            on_version(self.current(policy))

        def unsubscribe() -> None:
            self._subscribers.pop(subscription, None)

        return unsubscribe

    @property
    def _offered(self) -> int:
        """The version that some replica has already in a rolling activation; 0 without one."""
        return 0 if self._known is None or self._known.rolling is None else self._known.rolling.version

    async def run(self) -> None:
        """Watches the store for new versions, for the life of this replica.

        A failure is logged once, and retried whatever it is: a replica that no longer learns of versions lets rollouts
        wait for those that are current already.
        """
        await until_back(self._watch, Exception, RETRY_WATCH_AFTER_S, _log_failed_watch)

    async def wait_for_version(self, demand: PolicyDemand) -> None:
        """Returns when the weights that `demand` names are current, a minimum also when one replica has it.

        Raises:
            PolicyNotCurrent: they are not, and do not become current within `demand.wait_s` seconds.
            PolicyUnknown: there is no policy of this name.
            PolicyStoreLost: the policy store does not answer.
        """
        if (demand.min_version, demand.version, demand.name) == (None, None, None):
            return
        min_version, known = demand.min_version or 0, self.current(demand.name)
        # Versions only increase, so a known version proves a minimum. Which one is current, only the store can tell.
        if demand.version is None and known is not None and known >= min_version:
            return
        if demand.version is None and demand.name is None and self._offered >= min_version > 0:
            return
        waited_for = (demand.name, min_version, demand.version, demand.wait_s)
        self.note(await self.store.wait_for(*waited_for, takes_offered=True))

    async def has_policy(self, name: str) -> bool:
        """Whether there is a named policy of this name; the store is asked about one that is not known here.

        Raises:
            PolicyStoreLost: the policy store does not answer.
        """
        if name in self.known_versions:
            return True
        if re.fullmatch(NAME, name) is None:
            return False
        with suppress(PolicyUnknown):
            self.note(await self.store.wait_for(name, 0, None, 0.0))
            return True
        return False

    async def learn_version(self) -> None:
        """Returns when the current version of the policy without a name is known.

        Raises:
            PolicyStoreLost: the policy store does not answer.
        """
        if self.version is None:
            self.note(await self.store.wait_for(None, 0, None, None))

    async def follow_state(self) -> FollowState | None:
        """`None` if the service follows no folder. Raises `PolicyStoreLost`."""
        return await self.store.follow_state() if self._follows_folder else None

    async def _watch(self) -> None:
        self.note(await self.store.watch(self._known))


def _log_failed_watch(failure: Exception, is_first: bool) -> None:
    if not is_first:
        return
    if isinstance(failure, PolicyStoreLost):
        cause = {"cause": repr(failure.__cause__)}
        logger.warning("The policy store cannot be watched, retrying: %s", failure, extra=cause)
    else:
        logger.error("Watching the policy store failed, retrying: %s", failure, exc_info=failure)
