"""Which version is current, of the policy without a name and of the named ones, and waiting for it.

Guarantee: the number is the one on disk, and it is published only once the version is loaded by the replicas that
took part in its update.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from deployments.policy.failures import PolicyNotCurrent
from deployments.protocols.weight_versions import RollingActivation


@dataclass(frozen=True, slots=True)
class NamedVersions:
    """A store's answer at one moment: answers can overtake one another, and a later one has a higher `revision`."""

    store: str
    """Differs between any two stores, one that restarted included."""
    revision: int
    versions: Mapping[str, int] = field(default_factory=dict)
    """By name, of the policies that are served."""
    rolling: RollingActivation | None = None
    """The rolling activation under way; `None` without one."""

    def is_older_than(self, other: "NamedVersions") -> bool:
        return self.store == other.store and self.revision < other.revision


LONG_POLL_S = 5.0


class CurrentVersion:
    """The number of the current version of one policy, which can be waited for.

    Args:
        number: the version that is current on disk.
        longest_wait_s: bounds `wait_for`, in seconds.
    """

    def __init__(self, number: int, longest_wait_s: float) -> None:
        self._number = number
        self._longest_wait_s = longest_wait_s
        self._changed = asyncio.Condition()

    @property
    def number(self) -> int:
        return self._number

    async def publish(self, number: int) -> None:
        """Tells everyone who waits."""
        self._number = number
        async with self._changed:
            self._changed.notify_all()

    async def watch(self, seen: int | None) -> int:
        """Returns the current version as soon as it differs from `seen`, or unchanged after `LONG_POLL_S`."""
        return await self._number_when(lambda: self._number != seen, LONG_POLL_S)

    async def wait_for(self, min_version: int, version: int | None, wait_s: float | None) -> int:
        """Returns the current version once it is at least `min_version` and, if given, exactly `version`.

        Args:
            wait_s: seconds; as long as the service allows if `None` or longer than that.

        Raises:
            PolicyNotCurrent: this did not happen within `wait_s`, or can no longer happen.
        """
        wait_s = self._longest_wait_s if wait_s is None else min(wait_s, self._longest_wait_s)
        awaited = max(min_version, version or 0)
        current = await self._number_when(lambda: self._number >= awaited, wait_s)
        if current < awaited or (version is not None and current != version):
            field, value = ("policy.min_version", min_version) if version is None else ("policy.version", version)
            reason = f"it is not there after {wait_s:g} s" if current < awaited else "a newer one has taken its place"
            message = f"{reason}; version {current} is current"
            raise PolicyNotCurrent.of(field, message, value)
        return current

    async def _number_when(self, condition: Callable[[], bool], wait_s: float) -> int:
        """The current version as soon as `condition` holds, or after `wait_s`."""
        try:
            async with asyncio.timeout(wait_s), self._changed:
                await self._changed.wait_for(condition)
        except TimeoutError:
            return self._number
        return self._number
