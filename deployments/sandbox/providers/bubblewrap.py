"""The walls around a sandbox of the provider `local`: bubblewrap's command line, with namespaces, mounts and limits."""

import contextlib
import math
import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from deployments.sandbox.interface import MIB
from deployments.sandbox.isolation import NAMESPACES, SYSTEM_FOLDERS, folder_mounts, system_mounts
from deployments.sandbox.launch import NICENESS, HeldFds, default_interpreters
from deployments.sandbox.local import UserIdLease
from deployments.sandbox.programs import init
from deployments.sandbox.providers.interface import (
    MOST_PROCESSES,
    OWNER_LABEL,
    ProviderUnusable,
    SandboxSpec,
    owner_of_process,
)
from deployments.sandbox.system_calls import FilterOptions, system_call_filter

PORT = 8000
"""The port of the sandbox's own loopback that leads to the service."""
INIT = "/run/rollout/init.py"
DEFAULT_STORAGE_MB = 1024
MOST_OPEN_FILES = 4096
STARTS_WITHIN_S = 30.0
ACCOUNTS = {
    "/etc/passwd": b"root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "/etc/group": b"root:x:0:\nnogroup:x:65534:\n",
    "/etc/hosts": b"127.0.0.1 localhost sandbox\n",
}
FIRST_VARIABLES = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LANG": "C.UTF-8",
}


class BubblewrapCommand:
    """Builds the command line of one sandbox."""

    def __init__(self) -> None:
        """Checks that bubblewrap works. Raises `ProviderUnusable`."""
        if shutil.which("bwrap") is None:
            raise ProviderUnusable("the provider local needs bubblewrap: apt-get install bubblewrap.")
        self._filter = system_call_filter(FilterOptions())
        self._python, self._python_folders = interpreter()
        self.processors = Processors()
        self._owner = f"{OWNER_LABEL}={owner_of_process(os.getpid())}"
        with HeldFds() as held, lease() as uid:
            command = self.line(SandboxSpec(image="none"), uid, 0, 2, held)
            tried = subprocess.run(
                [*command[: command.index("prlimit")], "/usr/bin/env", "true"],
                check=False,
                capture_output=True,
                pass_fds=held.fds,
                timeout=STARTS_WITHIN_S,
                text=True,
            )
        if tried.returncode != 0:
            said = tried.stderr.strip()
            raise ProviderUnusable(f"the provider local: bubblewrap does not work on this machine: {said}")

    def line(self, spec: SandboxSpec, uid: int | None, control_fd: int, status_fd: int, held: HeldFds) -> list[str]:
        """The command line of bubblewrap, up to the working directory of the commands."""
        storage = (spec.storage_mb or DEFAULT_STORAGE_MB) * MIB
        owner = [] if uid is None else ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups"]
        command = ["nice", "-n", str(NICENESS), *owner, "bwrap", *NAMESPACES, "--json-status-fd", str(status_fd)]
        command += ["--unshare-user", "--uid", "0", "--gid", "0", "--cap-drop", "ALL", "--as-pid-1"]
        if self._filter is not None:
            command += ["--seccomp", str(held.add(self._filter))]
        command += ["--size", str(storage), "--tmpfs", "/", "--proc", "/proc", "--dev", "/dev"]
        command += ["--perms", "1777", "--size", str(64 * MIB), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"]
        command += ["--perms", "1777", "--dir", "/tmp", "--dir", "/var", "--perms", "1777", "--dir", "/var/tmp"]
        command += ["--perms", "0700", "--dir", "/root", *system_mounts()]
        outside_usr = [folder for folder in spec.read_only_folders if not Path(folder).is_relative_to("/usr")]
        command += folder_mounts([*self._python_folders, *outside_usr])
        for path, content in {**ACCOUNTS, INIT: Path(init.__file__).read_bytes()}.items():
            command += ["--perms", "0644", "--file", str(held.add(content)), path]
        limits = [f"--nproc={MOST_PROCESSES}", f"--nofile={MOST_OPEN_FILES}", "--core=0", "--msgqueue=0"]
        for name, value in FIRST_VARIABLES.items():
            command += ["--setenv", name, value]
        first = [self._python, "-I", "-S", "-B", INIT, str(control_fd), str(PORT), self._owner]
        return [*command, "prlimit", *limits, *first]

    def read_only(self, spec: SandboxSpec) -> list[str]:
        """Paths which are no files of the sandbox's own."""
        return [
            "/proc",
            "/dev",
            "/run/rollout",
            *SYSTEM_FOLDERS,
            *self._python_folders,
            *spec.read_only_folders,
            *ACCOUNTS,
        ]


class Processors:
    """Spreads sandboxes over the processors that this process may use."""

    def __init__(self) -> None:
        self._sandboxes = dict.fromkeys(os.sched_getaffinity(0), 0)

    @contextlib.contextmanager
    def pinned(self, cpus: float | None) -> Iterator[list[str]]:
        """The beginning of a command that may use so many of them, rounded up: those with the fewest sandboxes so far.

        It is empty for a command that may use all. The sandbox counts until the end of the block.
        """
        most = len(self._sandboxes) if cpus is None else math.ceil(cpus)
        if most >= len(self._sandboxes):
            yield []
            return
        # Other replicas of the machine choose among the same ones.
        shuffled = random.sample(list(self._sandboxes), len(self._sandboxes))
        chosen = sorted(shuffled, key=self._sandboxes.__getitem__)[:most]
        for processor in chosen:
            self._sandboxes[processor] += 1
        try:
            yield ["taskset", "--cpu-list", ",".join(map(str, chosen))]
        finally:
            for processor in chosen:
                self._sandboxes[processor] -= 1


@contextlib.contextmanager
def lease() -> Iterator[int | None]:
    """A user id that no other process has, if this one may give it; None otherwise. Raises `NoUserIdLeft`."""
    if os.geteuid() != 0:
        yield None
        return
    leased = UserIdLease()
    try:
        yield leased.uid
    finally:
        leased.close()


def interpreter() -> tuple[str, list[str]]:
    """The Python of first processes, and its folders outside of the system's. Raises `ProviderUnusable`."""
    for known in reversed(default_interpreters(())):
        if known.executable.startswith("/usr/") or os.geteuid() != 0:
            return known.executable, known.folders
    raise ProviderUnusable("the provider local needs a Python below /usr: apt-get install python3.")


def owners_of_processes() -> Iterator[tuple[int, str]]:
    """The processes that have the label of an owner as an argument: those that make a sandbox, and its first one."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                for argument in (folder / "cmdline").read_bytes().split(b"\0"):
                    if argument.startswith(f"{OWNER_LABEL}=".encode()):
                        yield int(folder.name), argument.decode().partition("=")[2]
