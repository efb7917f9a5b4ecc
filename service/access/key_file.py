"""Reads the keys file, and reads it anew when it has changed."""

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path

from service.access.keys import KeyRing, KeysInvalid, parsed_keys

CHECK_PERIOD_S = 1.0
logger = logging.getLogger("rollout_service.access")


class KeysNotReadable(Exception):
    """The keys file cannot be read at the start."""


class KeyFile:
    """
    Guarantee: no request that comes more than `CHECK_PERIOD_S` after a change is let in by a key that the file does not
    hold any longer. A file that cannot be read, or is wrong, changes nothing: the keys that it held last stay valid,
    and the log says so once.
    """

    def __init__(self, path: Path, now_s: Callable[[], float] = time.monotonic) -> None:
        """Raises `KeysNotReadable`: the file is not there, or its content is wrong."""
        self._path = path
        self._now_s = now_s
        self._checked_at = now_s()
        self._lock = asyncio.Lock()
        self._complaint = ""
        try:
            self._content = path.read_bytes()
            self._keys = parsed_keys(self._content)
        except (OSError, KeysInvalid) as error:
            raise KeysNotReadable(f"access.keys_file: {reason_of(error)} ({path})") from error

    async def keys(self) -> KeyRing:
        """The keys that are valid now."""
        if self._is_due():
            async with self._lock:
                # Another request may have checked it meanwhile.
                if self._is_due():
                    began_at = self._now_s()
                    await asyncio.to_thread(self._read_again)
                    self._checked_at = began_at
        return self._keys

    def _is_due(self) -> bool:
        return self._now_s() - self._checked_at >= CHECK_PERIOD_S

    def _read_again(self) -> None:
        # Its content is compared, not its time: a file system may write two versions in one tick of its clock.
        try:
            content = self._path.read_bytes()
            if content != self._content:
                self._keys = parsed_keys(content)
                self._content = content
                logger.info("The keys file has changed: %d keys are valid now.", len(self._keys))
            self._complaint = ""
        except (OSError, KeysInvalid) as error:
            complaint = reason_of(error)
            if complaint != self._complaint:
                logger.error("The keys file cannot be used, its last keys stay valid: %s", complaint)
            self._complaint = complaint


def reason_of(error: OSError | KeysInvalid) -> str:
    return error.strerror or type(error).__name__ if isinstance(error, OSError) else str(error)
