"""Names of what folders hold, for images that are made once for each content.

A folder is read again when the path, the size, the rights or a time of one of its files has changed, and no two callers
read it at once.
"""

import asyncio
import hashlib
import os
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from weakref import WeakValueDictionary

from deployments.sandbox.providers.interface import SandboxRefused

MOST_FOLDERS = 4096


class FolderStates:
    def __init__(self) -> None:
        self._known: OrderedDict[Path, tuple[str, str]] = OrderedDict()
        """By folder, the one that was asked for last at the end: the state of its files, and the name."""
        self._reading: WeakValueDictionary[Path, asyncio.Lock] = WeakValueDictionary()

    async def name_of(self, folder: Path) -> str:
        """A name that all folders with the same files have, and no others.

        Raises:
            SandboxRefused: a file cannot be read.
        """
        reading = self._reading.setdefault(folder, asyncio.Lock())
        async with reading:
            state = await asyncio.to_thread(digest_of, folder, state_of)
            known = self._known.get(folder)
            if known is None or known[0] != state:
                known = self._known[folder] = state, await asyncio.to_thread(digest_of, folder, content_of)
            self._known.move_to_end(folder)
            if len(self._known) > MOST_FOLDERS:
                self._known.popitem(last=False)
            return known[1]


def digest_of(folder: Path, described: Callable[[Path], str]) -> str:
    """A hash of the paths in the folder with what `described` says of each file. Raises `SandboxRefused`."""
    digest, root = hashlib.sha256(), folder.resolve()
    try:
        for path in sorted(folder.rglob("*")):
            # What a link out of the folder leads to is in no image.
            link = str(path.readlink()) if path.is_symlink() else None
            is_file = path.is_file() and path.resolve().is_relative_to(root)
            entry = path.relative_to(folder).as_posix(), link, described(path) if is_file else None
            digest.update(f"{entry!r}\n".encode())
    except OSError as error:
        raise SandboxRefused(f"{folder} cannot be read: {error}.") from error
    return digest.hexdigest()


def state_of(path: Path) -> str:
    found = path.stat()
    return f"{found.st_dev} {found.st_ino} {found.st_mode} {found.st_size} {found.st_mtime_ns} {found.st_ctime_ns}"


def content_of(path: Path) -> str:
    with path.open("rb") as file:
        return f"{os.access(path, os.X_OK)} {hashlib.file_digest(file, 'sha256').hexdigest()}"
