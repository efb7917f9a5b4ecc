"""Removes uploads that have expired, and deletes discarded files in a thread, for as long as the store lives."""

import asyncio
from typing import Protocol

from deployments.policy.versions.trash import Trash


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

    async def run(self, files: ExpiringFiles) -> None:
        """Never returns."""
        while True:
            self._wake.clear()
            files.drop_expired()
            await asyncio.to_thread(self._trash.empty)
            try:
                async with asyncio.timeout(files.next_expiry_s()):
                    await self._wake.wait()
            except TimeoutError:
                continue
