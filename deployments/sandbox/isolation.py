"""Isolates a program by a launcher of our own (`programs/jail.py`), where bubblewrap is not installed or cannot run.

`NamespaceJail` builds the same walls as bubblewrap. `LimitJail` is for machines where no namespace may be made, such as
containers without privileges: resource limits, a filter of system calls, and Landlock where the kernel has it.
"""

import ctypes
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, ClassVar

from deployments.sandbox.bubblewrap import SHARED_MEMORY_BYTES, SYSTEM_FOLDERS, Bubblewrap
from deployments.sandbox.interface import Limits, Program
from deployments.sandbox.launch import (
    NICENESS,
    WORK,
    Interpreter,
    Launch,
    environment,
    held_fds,
    resource_limits,
)
from deployments.sandbox.system_calls import FilterOptions, system_call_filter
from deployments.sandbox.walls import WallName

LAUNCHER = Path(__file__).parent / "programs" / "jail.py"
LANDLOCK_CREATE_RULESET, LANDLOCK_VERSION_FLAG = 444, 1
LANDLOCK_WITH_SIGNALS = 6
NOT_WITHOUT_NAMESPACES: tuple[WallName, ...] = ("total_memory", "disk")


def landlock_version() -> int:
    """Of the interface of this kernel; 0 without Landlock."""
    version: int = ctypes.CDLL(None).syscall(LANDLOCK_CREATE_RULESET, None, 0, LANDLOCK_VERSION_FLAG)
    return max(version, 0)


class Jail:
    """What both have in common."""

    name: ClassVar[str]
    by: Mapping[WallName, str]
    namespaces: ClassVar[bool]

    def __init__(self, interpreter: Interpreter) -> None:
        self._interpreter = interpreter
        self._landlock = landlock_version()
        can_signal_outside = not (self.namespaces or self._landlock >= LANDLOCK_WITH_SIGNALS or os.geteuid() == 0)
        options = FilterOptions(sockets=self.namespaces, signals=not can_signal_outside)
        self._filter = (system_call_filter(options) or b"").hex()
        system = [Path(folder) for folder in SYSTEM_FOLDERS]
        self._links = {str(path): str(path.readlink()) for path in system if path.is_symlink()}
        of_system = [str(path) for path in system if path.exists() and not path.is_symlink()]
        self._folders = of_system + interpreter.folders

    @contextmanager
    def launch(
        self, program: Program, files: Mapping[str, bytes], limits: Limits, uid: int | None, status_fd: int
    ) -> Iterator[Launch]:
        """See `Isolation.launch`."""
        with ExitStack() as closing:
            held = closing.enter_context(held_fds())
            work = WORK if self.namespaces else closing.enter_context(private_folder())
            specification: dict[str, Any] = {
                "namespaces": self.namespaces,
                "landlock": self._landlock,
                "uid": uid,
                "status_fd": status_fd,
                "folders": self._folders,
                "links": self._links,
                "work": work,
                "files": {name: held.add(content) for name, content in files.items()},
                "disk_bytes": limits.disk_bytes,
                "shared_memory_bytes": SHARED_MEMORY_BYTES,
                "limits": resource_limits(limits, self._processes(limits, uid)),
                "filter": self._filter,
                "command": self._interpreter.command(program),
                "environment": environment(self._interpreter, work),
            }
            launcher = [sys.executable, "-I", "-S", "-B", str(LAUNCHER), repr(specification)]
            yield Launch(
                ["nice", "-n", str(NICENESS), *launcher],
                {"PATH": os.environ.get("PATH", os.defpath)},
                tuple(held.fds),
                9 if self.namespaces else 15,
            )

    def _processes(self, limits: Limits, uid: int | None) -> int:
        if uid is not None:
            return limits.processes
        # The kernel counts those of the namespace, its first process among them; or all of the service's user.
        return limits.processes + (1 if self.namespaces else processes_of_user(os.getuid()))


class NamespaceJail(Jail):
    """New namespaces for everything, as under bubblewrap."""

    name = "namespaces"
    by = Bubblewrap.by
    namespaces = True


class LimitJail(Jail):
    """No namespaces."""

    name = "limits"
    namespaces = False

    def __init__(self, interpreter: Interpreter) -> None:
        super().__init__(interpreter)
        by: dict[WallName, str] = {
            "network": "a seccomp filter that refuses sockets",
            "files": f"Landlock, version {self._landlock}",
            "service_processes": f"Landlock, version {self._landlock}, and the user id or a seccomp filter",
            "processor_time": "RLIMIT_CPU of each process",
            "process_count": "RLIMIT_NPROC of the run's own user"
            if os.geteuid() == 0
            else "RLIMIT_NPROC of the service's user, from what it has at the start of the run",
            "ends_whole": "a process that inherits and kills all orphans of the run",
        }
        merged = {**Bubblewrap.by, **by}
        self.by = {name: means for name, means in merged.items() if name not in NOT_WITHOUT_NAMESPACES}


@contextmanager
def private_folder() -> Iterator[str]:
    """A folder of the disk that is removed afterwards, whatever a program made of it."""
    folder = tempfile.mkdtemp(prefix="rollout-sandbox-")
    try:
        yield folder
    finally:
        # Python's own way is recursive and fails for a tree that is deep enough.
        subprocess.run(["chmod", "-R", "u+rwX", folder], check=False, stderr=subprocess.DEVNULL)
        subprocess.run(["rm", "-rf", folder], check=False)


def processes_of_user(uid: int) -> int:
    """Processes and threads of the user."""
    count = 0
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if folder.stat().st_uid == uid:
                    count += sum(1 for _ in (folder / "task").iterdir())
            except OSError:
                continue
    return count
