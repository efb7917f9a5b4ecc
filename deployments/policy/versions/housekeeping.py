"""Removes uploads that have expired, and deletes discarded files in a thread, for as long as the store lives."""

import asyncio
import logging
from contextlib import suppress
from typing import Protocol

from deployments.policy.versions.trash import Trash

TRY_AGAIN_AFTER_S = 60.0
logger = logging.getLogger("rollout_service.policy")


class ExpiringFiles(Protocol):
    """What expires; `uploads.Uploads` implements it."""

    def drop_expired(self) -> None: ...

    def next_expiry_s(self) -> float | None:
        """Seconds until something expires; `None` if nothing will."""
        ...


class Housekeeping:
    def __init__(self, trash: Trash) -> None:
        self._trash = trash
        self._wake = asyncio.Event()

    def wake(self) -> None:
        """To be called when something was discarded, or something new may expire."""
        self._wake.set()

    async def run(self, *files: ExpiringFiles) -> None:
        """Never returns."""
        while True:
            self._wake.clear()
            pause_s: float | None = TRY_AGAIN_AFTER_S
            try:
                for each in files:
                    each.drop_expired()
                await asyncio.to_thread(self._trash.empty)
                expiries = [each.next_expiry_s() for each in files]
                pause_s = min((expiry for expiry in expiries if expiry is not None), default=None)
            except OSError as error:
                logger.warning("Files of the policy store could not be removed.", exc_info=error)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._wake.wait()
