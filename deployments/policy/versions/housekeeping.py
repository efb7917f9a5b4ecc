"""Removes what is needed no more: expired uploads are dropped, and discarded files are deleted in a thread.

To free gigabytes takes seconds, so it is done apart. Guarantees: what is discarded is gone from its place at once, by
one rename; what a store leaves in the trash when it dies is deleted by the next one.
"""

import asyncio
import logging
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from uuid import uuid4


@dataclass(frozen=True, slots=True)
class Trash:
    """Discarded files, on their way out of `folder`, that of the version store."""

    folder: Path

    def discard(self, path: Path) -> None:
        """Moves a file or a folder out of its place; one that does not exist is ignored."""
        self._place.mkdir(parents=True, exist_ok=True)
        try:
            path.rename(self._place / uuid4().hex)
        except FileNotFoundError:
            return

    def empty(self) -> None:
        """Deletes what was discarded. Call it from a thread."""
        try:
            discarded = list(self._place.iterdir())
        except FileNotFoundError:
            return
        for path in discarded:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    @property
    def _place(self) -> Path:
        return self.folder / "removing"


TRY_AGAIN_AFTER_S = 60.0
logger = logging.getLogger("rollout_service.policy")


class ExpiringFiles(Protocol):
    """Files that expire: `PolicyRegistry` implements it."""

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
        """Drops what expires and empties the trash, for ever."""
        while True:
            self._wake.clear()
            pause_s: float | None = TRY_AGAIN_AFTER_S
            try:
                files.drop_expired()
                await asyncio.to_thread(self._trash.empty)
                pause_s = files.next_expiry_s()
            except OSError as error:
                logger.warning("Files of the policy store could not be removed.", exc_info=error)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._wake.wait()
