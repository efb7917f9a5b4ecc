"""The walls of runs where no namespace may be made, such as in containers without privileges, or without bubblewrap.

They are resource limits, a filter of system calls, and Landlock where the kernel has it (`programs/jail.py`).
"""

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from deployments.sandbox.bubblewrap import SYSTEM_FOLDERS
from deployments.sandbox.interface import Limits, Program, WallName
from deployments.sandbox.launch import NICENESS, Interpreter, Launch
from deployments.sandbox.system_calls import system_call_filter

LANDLOCK_WITH_SIGNALS = 6
_LAUNCHER = Path(__file__).parent / "programs" / "jail.py"
_LANDLOCK_CREATE_RULESET, _LANDLOCK_VERSION_FLAG = 444, 1


def _landlock_version() -> int:
    """Version of this kernel's Landlock interface; 0 without Landlock."""
    version: int = ctypes.CDLL(None).syscall(_LANDLOCK_CREATE_RULESET, None, 0, _LANDLOCK_VERSION_FLAG)
    return max(version, 0)


class LimitJail:
    """The walls of runs without namespaces."""

    name = "limits"

    def __init__(self, interpreter: Interpreter) -> None:
        self._interpreter = interpreter
        self._landlock = _landlock_version()
        can_signal_outside = not (self._landlock >= LANDLOCK_WITH_SIGNALS or os.geteuid() == 0)
        self._filter = (system_call_filter(sockets=False, signals=not can_signal_outside) or b"").hex()
        by_landlock: set[WallName] = {"files", "service_processes"} if self._landlock == 0 else set()
        by_filter: set[WallName] = {"network", "system_calls"} if not self._filter else set()
        self.without: frozenset[WallName] = frozenset({"total_memory", "disk", *by_landlock, *by_filter})
        system = [Path(folder) for folder in SYSTEM_FOLDERS]
        of_system = [str(path) for path in system if path.exists() and not path.is_symlink()]
        self._folders = of_system + interpreter.folders

    @asynccontextmanager
    async def launch(
        self, program: Program, files: Mapping[str, bytes], limits: Limits, uid: int | None, status_fd: int
    ) -> AsyncIterator[Launch]:
        """See `Bubblewrap.launch`."""
        work = tempfile.mkdtemp(prefix="rollout-sandbox-")
        try:
            _write_files(work, files)
            # Without an id of its own, the kernel counts all processes of the service's user.
            counted = await asyncio.to_thread(_processes_of_user, os.getuid()) if uid is None else 0
            specification: dict[str, Any] = {
                "landlock": self._landlock,
                "uid": uid,
                "status_fd": status_fd,
                "folders": self._folders,
                "work": work,
                "limits": limits.of_kernel(limits.processes + counted),
                "filter": self._filter,
                "command": self._interpreter.command(program),
                "environment": self._interpreter.variables(work),
            }
            launcher = [sys.executable, "-I", "-S", "-B", str(_LAUNCHER), repr(specification)]
            yield Launch(["nice", "-n", str(NICENESS), *launcher], stop_signal=signal.SIGTERM)
        finally:
            await asyncio.to_thread(_remove, work)


def _write_files(work: str, files: Mapping[str, bytes]) -> None:
    """Writes the files of a run, which the program may change, as it may their folder."""
    folder = Path(work)
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o777 if path.is_dir() else 0o666)


def _remove(folder: str) -> None:
    """Removes a folder, whatever a program made of it."""
    # Python's own way is recursive and fails for a tree that is deep enough.
    subprocess.run(["chmod", "-R", "u+rwX", folder], check=False, stderr=subprocess.DEVNULL)
    subprocess.run(["rm", "-rf", folder], check=False)


def _processes_of_user(uid: int) -> int:
    """Processes and threads of the user."""
    count = 0
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                if folder.stat().st_uid == uid:
                    count += sum(1 for _ in (folder / "task").iterdir())
    return count
