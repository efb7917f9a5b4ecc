"""Files of the policy store that survive a crash of the machine, and files on their way out.

Guarantees: `write_durably`, `make_folder_durably` and `flush` return once the change would survive a crash; what is
discarded is gone from its place at once, by one rename, and deleted by a thread later, since freeing gigabytes takes
seconds; what a store leaves in the trash when it dies is deleted by the next one.
"""

import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4


def write_durably(path: Path, text: str) -> None:
    """Replaces the file at once: after a crash it holds either the old text or the new one, whole."""
    make_folder_durably(path.parent)
    beside = path.with_suffix(".new")
    with beside.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
    flush(path.parent)


def make_folder_durably(folder: Path) -> None:
    """Makes the folder and its missing parents."""
    if not folder.is_dir():
        make_folder_durably(folder.parent)
        folder.mkdir(exist_ok=True)
        flush(folder.parent)


def flush(path: Path) -> None:
    """Waits until the content of a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass(frozen=True, slots=True)
class Trash:
    """Discarded files in `folder`, the root of the policy store's folder."""

    folder: Path

    def discard(self, path: Path) -> None:
        """Moves a file or a folder out of its place; one that does not exist is ignored."""
        if not path.exists():
            return
        self._place.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):
            path.rename(self._place / uuid4().hex)

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
