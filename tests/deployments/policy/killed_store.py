"""The remains of a policy store that is killed: its folder and its replicas before each file operation of a story.

What a killed process wrote stays; what it had not done yet is missing. (What a crash of the machine leaves, when writes
that were not flushed are lost, is in `crashing_disk.py`.)
"""

import io
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import Any

import pytest

from tests.deployments.policy.policy_world import World
from tests.deployments.policy.scripted_replicas import ScriptedReplica

OPERATIONS = ("rename", "replace", "link", "unlink", "mkdir", "rmdir", "truncate", "fsync")
"""Functions of the module `os`. Files are written as a whole and then flushed: kills are recorded before and after."""


@dataclass(frozen=True, slots=True)
class Remains:
    """The remains of a store that was killed."""

    operation: str
    """The one that it did not carry out any more."""
    files: dict[str, bytes]
    """By their paths in its folder; folders that hold none are left out."""
    replicas: list[ScriptedReplica]
    """Copies of its replicas."""
    acknowledged: int
    """The newest version whose push was answered."""

    @property
    def content(self) -> tuple[Any, ...]:
        return self.files, [(each.loaded, each.is_on_trial, each.keys, each.files) for each in self.replicas]

    def restore(self, folder: Path) -> None:
        for name, content in self.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)

    async def register(self, world: World) -> list[ScriptedReplica]:
        """Registers the replicas with the store that starts in place of the one that was killed."""
        world.replicas += [replace(each, store=world.store, cluster=world.cluster) for each in self.replicas]
        return [await replica.start() for replica in world.replicas]


@dataclass
class KilledStore:
    """Records the remains of a kill before each file operation and each command that a replica carries out."""

    world: World
    acknowledged: int = 0
    remains: list[Remains] = field(default_factory=list)
    _contents: dict[tuple[int, int, int], bytes] = field(default_factory=dict)
    _recording: Lock = field(default_factory=Lock)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in OPERATIONS:
            monkeypatch.setattr(os, name, self._recorded(name, getattr(os, name)))
        monkeypatch.setattr(io, "open", self._opening(io.open))
        for replica in self.world.replicas:
            monkeypatch.setattr(replica, "note", self._recorded("command", replica.note))

    def record(self, operation: str) -> None:
        with self._recording:
            replicas = [
                replace(each, keys=dict(each.keys), files=dict(each.files), received=[], accepts_requests=False)
                for each in self.world.replicas
            ]
            now = Remains(operation, self._files(), replicas, self.acknowledged)
            if not self.remains or self.remains[-1].content != now.content:
                self.remains.append(now)

    def _recorded(self, name: str, change: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(*arguments: Any, **options: Any) -> Any:
            self.record(name)
            return change(*arguments, **options)

        return recorded

    def _opening(self, open_file: Callable[..., Any]) -> Callable[..., Any]:
        """`io.open`, after which a file that is opened for writing is empty, or as long as it was."""

        def opened(path: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
            file = open_file(path, mode, *arguments, **options)
            if "w" in mode or "a" in mode:
                self.record("write")
            return file

        return opened

    def _files(self) -> dict[str, bytes]:
        files = {}
        for path in sorted(self.world.folder.rglob("*")):
            try:
                if path.is_file():
                    files[str(path.relative_to(self.world.folder))] = self._content(path)
            except FileNotFoundError:
                # Another thread has removed it meanwhile.
                continue
        return files

    def _content(self, path: Path) -> bytes:
        """Read once, as long as the file does not change."""
        status = path.stat()
        key = (status.st_ino, status.st_size, status.st_mtime_ns)
        if key not in self._contents:
            self._contents[key] = path.read_bytes()
        return self._contents[key]
