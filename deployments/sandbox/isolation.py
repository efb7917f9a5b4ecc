"""The ways to isolate a program, the stronger one first: `Bubblewrap`, `LimitJail`.

`Bubblewrap` makes new namespaces for everything, and a file system that holds almost nothing. Where the service runs as
root, the program gets a user id of its own before it starts; else a new user namespace maps the service's own one.
Either lets the kernel count the processes of one run alone: it does not for root.

`LimitJail` (`programs/jail.py`) is for machines without bubblewrap, or where no namespace may be made, such as
containers without privileges: resource limits, a filter of system calls, and Landlock where the kernel has it.
"""

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from deployments.sandbox.interface import MIB, Limits, Program, WallName
from deployments.sandbox.launch import NICENESS, WORK, HeldFds, Interpreter, Launch, environment, resource_limits
from deployments.sandbox.system_calls import FilterOptions, system_call_filter

SYSTEM_FOLDERS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives")
SHARED_MEMORY_BYTES = MIB
"""Size of `/dev/shm`, where the locks of `multiprocessing` are."""


class Bubblewrap:
    """Builds the command line of `bwrap`."""

    name = "bubblewrap"
    by: Mapping[WallName, str] = {
        "network": "a network namespace without interfaces",
        "files": "a mount namespace with the system's folders to read, and private memory to write",
        "service_processes": "a process namespace",
        "environment_variables": "the program gets its own ones only",
        "system_calls": "a seccomp filter",
        "processor_time": "RLIMIT_CPU of each process, and measuring all of them",
        "memory": "RLIMIT_AS of each process",
        "total_memory": "measuring all processes of the run",
        "process_count": "RLIMIT_NPROC of the run's own user",
        "file_size": "RLIMIT_FSIZE",
        "disk": "the size of the private tmpfs",
        "ends_whole": "the end of the process namespace",
    }

    def __init__(self, interpreter: Interpreter) -> None:
        self._interpreter = interpreter
        self._filter = system_call_filter(FilterOptions())
        self._mounts = [*system_mounts(), *folder_mounts(interpreter.folders)]

    @contextmanager
    def launch(
        self, program: Program, files: Mapping[str, bytes], limits: Limits, uid: int | None, status_fd: int
    ) -> Iterator[Launch]:
        """See `Isolation.launch`."""
        with HeldFds() as held:
            command = ["nice", "-n", str(NICENESS), "bwrap", "--json-status-fd", str(status_fd), *NAMESPACES]
            if uid is None:
                # The first process of the namespace counts as one of the run's.
                command += ["--unshare-user", "--cap-drop", "ALL"]
                limited = prlimit(limits, limits.processes + 1)
            else:
                command += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
                owner = [f"--reuid={uid}", f"--regid={uid}", "--clear-groups"]
                limited = ["setpriv", *owner, *prlimit(limits, limits.processes)]
            if self._filter is not None:
                command += ["--seccomp", str(held.add(self._filter))]
            command += [*private_mounts(limits), *self._mounts]
            for folder in sorted({str(parent) for name in files for parent in PurePosixPath(name).parents} - {"."}):
                command += ["--perms", "0777", "--dir", f"{WORK}/{folder}"]
            for name, content in files.items():
                command += ["--perms", "0666", "--file", str(held.add(content)), f"{WORK}/{name}"]
            command += ["--remount-ro", "/", "--chdir", WORK]
            for name, value in environment(self._interpreter, WORK).items():
                command += ["--setenv", name, value]
            command += [*limited, *self._interpreter.command(program)]
            yield Launch(command, {"PATH": os.environ.get("PATH", os.defpath)}, tuple(held.fds))


NAMESPACES = [
    *("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"),
    *("--die-with-parent", "--new-session", "--hostname", "sandbox", "--clearenv"),
]


def private_mounts(limits: Limits) -> list[str]:
    """Mounts in memory that the program can write to."""
    return [
        *("--proc", "/proc", "--dev", "/dev"),
        *("--perms", "1777", "--size", str(SHARED_MEMORY_BYTES), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"),
        *("--perms", "1777", "--size", str(limits.disk_bytes), "--tmpfs", "/tmp"),
        *("--perms", "0777", "--dir", WORK),
    ]


def prlimit(limits: Limits, processes: int) -> list[str]:
    values = resource_limits(limits, processes).items()
    return ["prlimit", *(f"--{name}={soft}:{hard}" for name, (soft, hard) in values)]


def system_mounts() -> list[str]:
    """The system's programs and libraries, to read."""
    mounts = []
    for folder in SYSTEM_FOLDERS:
        path = Path(folder)
        if path.is_symlink():
            mounts += ["--symlink", str(path.readlink()), folder]
        elif path.exists():
            mounts += ["--ro-bind", folder, folder]
    return mounts


def folder_mounts(folders: list[str]) -> list[str]:
    """Folders that are not below the system's, to read."""
    # bubblewrap would make parents that only root may enter.
    parents = sorted({str(parent) for folder in folders for parent in Path(folder).parents} - {"/"})
    mounts = [part for parent in parents for part in ("--perms", "0755", "--dir", parent)]
    return mounts + [part for folder in folders for part in ("--ro-bind", folder, folder)]


LAUNCHER = Path(__file__).parent / "programs" / "jail.py"
LANDLOCK_CREATE_RULESET, LANDLOCK_VERSION_FLAG = 444, 1
LANDLOCK_WITH_SIGNALS = 6
NOT_WITHOUT_NAMESPACES: tuple[WallName, ...] = ("total_memory", "disk")


def landlock_version() -> int:
    """Version of this kernel's Landlock interface; 0 without Landlock."""
    version: int = ctypes.CDLL(None).syscall(LANDLOCK_CREATE_RULESET, None, 0, LANDLOCK_VERSION_FLAG)
    return max(version, 0)


class LimitJail:
    """Resource limits, a filter of system calls and Landlock, by `programs/jail.py`."""

    name = "limits"

    def __init__(self, interpreter: Interpreter) -> None:
        self._interpreter = interpreter
        self._landlock = landlock_version()
        can_signal_outside = not (self._landlock >= LANDLOCK_WITH_SIGNALS or os.geteuid() == 0)
        options = FilterOptions(sockets=False, signals=not can_signal_outside)
        self._filter = (system_call_filter(options) or b"").hex()
        system = [Path(folder) for folder in SYSTEM_FOLDERS]
        of_system = [str(path) for path in system if path.exists() and not path.is_symlink()]
        self._folders = of_system + interpreter.folders
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
    def launch(
        self, program: Program, files: Mapping[str, bytes], limits: Limits, uid: int | None, status_fd: int
    ) -> Iterator[Launch]:
        """See `Isolation.launch`."""
        with HeldFds() as held, private_folder() as work:
            # Without an id of its own, the kernel counts all processes of the service's user.
            processes = limits.processes + (processes_of_user(os.getuid()) if uid is None else 0)
            specification: dict[str, Any] = {
                "landlock": self._landlock,
                "uid": uid,
                "status_fd": status_fd,
                "folders": self._folders,
                "work": work,
                "files": {name: held.add(content) for name, content in files.items()},
                "limits": resource_limits(limits, processes),
                "filter": self._filter,
                "command": self._interpreter.command(program),
                "environment": environment(self._interpreter, work),
            }
            launcher = [sys.executable, "-I", "-S", "-B", str(LAUNCHER), repr(specification)]
            yield Launch(
                ["nice", "-n", str(NICENESS), *launcher],
                {"PATH": os.environ.get("PATH", os.defpath)},
                tuple(held.fds),
                stop_signal=signal.SIGTERM,
            )


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
