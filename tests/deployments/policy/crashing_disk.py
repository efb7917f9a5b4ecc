"""The content of a folder after a crash of the machine, by the recorded calls of `os.fsync`."""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

Names = dict[str, int]
"""By name in a folder, the inode."""


@dataclass
class CrashingDisk:
    """The content of a flushed file survives as it was then, and the names in a flushed folder; nothing else does.

    A disk may also write more than it has to, and in another order: `survivors` copies the two extremes, one with only
    the names that were flushed and one with all names, each with only the content that was flushed.
    """

    folder: Path
    """Exists and is durable, but for what is in it."""
    contents: dict[int, bytes] = field(default_factory=dict)
    names: dict[int, Names] = field(default_factory=dict)
    at_each_change: Callable[[], None] = lambda: None
    _open: list[int] = field(default_factory=list)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """From now on `at_each_change` is called after each flush and each rename."""
        for name in ("rename", "replace"):
            monkeypatch.setattr(os, name, self._reporting(getattr(os, name)))
        monkeypatch.setattr(os, "fsync", self._fsync)

    def close(self) -> None:
        for descriptor in self._open:
            os.close(descriptor)

    def survivors(self, into: Path) -> list[Path]:
        """Copies what a crash now would leave; returns the folders of the copies."""
        copies = [into / "flushed names", into / "all names"]
        for copy, names_of in zip(copies, (lambda path: self.names.get(inode(path), {}), names_in), strict=True):
            shutil.rmtree(copy, ignore_errors=True)
            self._copy(self.folder, copy, names_of)
        return copies

    def _copy(self, folder: Path, copy: Path, names_of: Callable[[Path], Names]) -> None:
        """By inode: a name may have been given to another file since it was flushed."""
        places = {inode(path): path for path in self.folder.rglob("*")} | {inode(self.folder): self.folder}
        copy.mkdir(parents=True)
        for name, number in names_of(folder).items():
            place = places.get(number)
            if place is not None and place.is_dir():
                self._copy(place, copy / name, names_of)
            else:
                (copy / name).write_bytes(self.contents.get(number, b""))

    def _fsync(self, descriptor: int) -> None:
        status = os.fstat(descriptor)
        # An open file keeps its inode, which would otherwise be given to another file.
        self._open.append(os.dup(descriptor))
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if path.is_dir():
            self.names[status.st_ino] = names_in(path)
        else:
            self.contents[status.st_ino] = path.read_bytes()
        self.at_each_change()

    def _reporting(self, change: Callable[..., None]) -> Callable[..., None]:
        def reported(*arguments: object, **options: object) -> None:
            change(*arguments, **options)
            self.at_each_change()

        return reported


def inode(path: Path) -> int:
    return path.stat().st_ino


def names_in(folder: Path) -> Names:
    return {path.name: inode(path) for path in folder.iterdir()}
