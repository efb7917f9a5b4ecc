"""The exclusive right to change the weights of replicas, as a lock that is acquired as an object, the lease.

Guarantees: at most one lease is held at a time; a lease is released exactly once, by its owner; a caller that is
cancelled while it waits for the lease does not hold it.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from deployments.policy.failures import UpdateUnderWay
from rollout_client.contract.policy import SwitchOptions


class UpdateLease:
    """Belongs to whoever acquired it, or to whoever it was handed over to. `UpdateLock` creates it."""

    def __init__(self, release: Callable[[], None]) -> None:
        self._unlock: Callable[[], None] | None = release

    @property
    def is_held(self) -> bool:
        """False once it was released or handed over."""
        return self._unlock is not None

    def release(self) -> None:
        """Lets the next caller acquire the lock.

        Raises:
            RuntimeError: the lease was released or handed over before.
        """
        self._take_unlock()()

    def hand_over(self) -> "UpdateLease":
        """Returns a lease for the new owner; this one can no longer be released.

        Raises:
            RuntimeError: the lease was released or handed over before.
        """
        return UpdateLease(self._take_unlock())

    def _take_unlock(self) -> Callable[[], None]:
        unlock, self._unlock = self._unlock, None
        if unlock is None:
            raise RuntimeError("The update lease was released or handed over before.")
        return unlock


class UpdateLock:
    """Held by an update, by a weight transfer, or while it is decided whether a replica that starts may join."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._activity: str | None = None

    @property
    def is_held(self) -> bool:
        return self._lock.locked()

    @asynccontextmanager
    async def lease(self, activity: str | None = None) -> AsyncIterator[UpdateLease]:
        """Waits for the lease and releases it at the end of the block, unless it was handed over in the block.

        Args:
            activity: what the owner does, for callers that do not wait; without it, callers are never refused.
        """
        await self._lock.acquire()
        self._activity = activity
        lease = UpdateLease(self._unlock)
        try:
            yield lease
        finally:
            if lease.is_held:
                lease.release()

    def refuse_if_busy(self, options: SwitchOptions) -> None:
        """Raises `UpdateUnderWay` if the caller does not wait and an update or a transfer holds the lease."""
        if options.if_busy == "refuse" and self._activity is not None:
            message = f"{self._activity}; wait for it, or say if_busy=wait"
            raise UpdateUnderWay.of("if_busy", message, "refuse")

    def _unlock(self) -> None:
        self._activity = None
        self._lock.release()
