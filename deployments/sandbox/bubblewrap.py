"""Isolates a program by bubblewrap: new namespaces for everything, and a file system that holds almost nothing.

Where the service runs as root, the program gets a user id of its own before it starts; else a new user namespace maps
the service's own one. Either lets the kernel count the processes of one run alone: it does not for root.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from deployments.sandbox.interface import MIB, Limits, Program
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

SYSTEM_FOLDERS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives")
SHARED_MEMORY_BYTES = MIB
"""Of `/dev/shm`, where the locks of `multiprocessing` are."""


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
        with held_fds() as held:
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
            command += [*private_folders(limits), *self._mounts]
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


def private_folders(limits: Limits) -> list[str]:
    """What the program can write to, in memory."""
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
