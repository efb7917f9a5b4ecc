"""The walls around a sandbox of the provider `local`, and the processors that it may use."""

import contextlib
import itertools
import math
import os
import random
import shutil
import subprocess
from functools import cache
from pathlib import Path

import psutil

from deployments.sandbox.bubblewrap import SYSTEM_FOLDERS, bubblewrap_launch
from deployments.sandbox.interface import MIB
from deployments.sandbox.launch import Launch, default_interpreters, leased_uid
from deployments.sandbox.programs import init
from deployments.sandbox.providers.interface import (
    MOST_PROCESSES,
    OWNER_LABEL,
    ProviderUnusable,
    SandboxSpec,
)
from deployments.workers.cleanup import has_died, owner_of

PORT = 8000
"""The port of the sandbox's own loopback that leads to the service."""
STARTS_WITHIN_S = 30.0
FIRST_VARIABLES = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LANG": "C.UTF-8",
}
_INIT = "/run/rollout/init.py"
_DEFAULT_STORAGE_MB = 1024
_MOST_OPEN_FILES = 4096
_ACCOUNTS = {
    "/etc/passwd": b"root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "/etc/group": b"root:x:0:\nnogroup:x:65534:\n",
    "/etc/hosts": b"127.0.0.1 localhost sandbox\n",
}


def check_bubblewrap() -> None:
    """Raises `ProviderUnusable` unless a sandbox can be launched on this machine."""
    if shutil.which("bwrap") is None:
        raise ProviderUnusable("the provider local needs bubblewrap: apt-get install bubblewrap.")
    with contextlib.ExitStack() as held, leased_uid() as uid:
        launch = sandbox_launch(SandboxSpec(image="none"), uid, 0, 2, "/", held)
        tried = subprocess.run(
            [*launch.command[: launch.command.index("prlimit")], "/usr/bin/env", "true"],
            check=False,
            capture_output=True,
            pass_fds=launch.pass_fds,
            timeout=STARTS_WITHIN_S,
            text=True,
        )
    if tried.returncode != 0:
        said = tried.stderr.strip()
        raise ProviderUnusable(f"the provider local: bubblewrap does not work on this machine: {said}")


def sandbox_launch(
    spec: SandboxSpec, uid: int | None, control_fd: int, status_fd: int, workdir: str, held: contextlib.ExitStack
) -> Launch:
    """The launch of a sandbox, whose first process is `programs/init.py`. Raises `ProviderUnusable`."""
    python, python_folders = _interpreter()
    owner = f"{OWNER_LABEL}={owner_of(os.getpid())}"
    storage = (spec.storage_mb or _DEFAULT_STORAGE_MB) * MIB
    limits = [f"--nproc={MOST_PROCESSES}", f"--nofile={_MOST_OPEN_FILES}", "--core=0", "--msgqueue=0"]
    init_argv = [python, "-I", "-S", "-B", _INIT, str(control_fd), str(PORT), owner, workdir]
    folders = [folder for folder in spec.read_only_folders if not Path(folder).is_relative_to("/usr")]
    return bubblewrap_launch(
        status_fd,
        held,
        outside=[] if uid is None else ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups"],
        users=["--unshare-user", "--uid", "0", "--gid", "0", "--cap-drop", "ALL", "--as-pid-1"],
        mounts=[
            *("--size", str(storage), "--tmpfs", "/", "--perms", "1777", "--dir", "/tmp", "--dir", "/var"),
            *("--perms", "1777", "--dir", "/var/tmp", "--perms", "0700", "--dir", "/root"),
        ],
        shared_memory_bytes=64 * MIB,
        folders=[*python_folders, *folders],
        files={**_ACCOUNTS, _INIT: Path(init.__file__).read_bytes()},
        file_mode="0644",
        variables=FIRST_VARIABLES,
        inside=["prlimit", *limits, *init_argv],
    )


def read_only_paths(spec: SandboxSpec) -> list[str]:
    """Paths which are no files of the sandbox's own."""
    return [
        *("/proc", "/dev", "/run/rollout", *SYSTEM_FOLDERS),
        *(*_interpreter()[1], *spec.read_only_folders, *_ACCOUNTS),
    ]


class Processors:
    """Spreads sandboxes over the processors that this process may use, by taking these in turn."""

    def __init__(self) -> None:
        known = os.sched_getaffinity(0)
        self._count = len(known)
        # Other replicas of the machine choose among the same ones.
        self._in_turn = itertools.cycle(random.sample(sorted(known), len(known)))

    def pinned(self, cpus: float | None) -> list[str]:
        """The beginning of a command that may use so many of them, rounded up; empty for one that may use all."""
        if cpus is None or math.ceil(cpus) >= self._count:
            return []
        chosen = itertools.islice(self._in_turn, math.ceil(cpus))
        return ["taskset", "--cpu-list", ",".join(map(str, chosen))]


@cache
def _interpreter() -> tuple[str, list[str]]:
    """The Python of first processes, and its folders outside of the system's. Raises `ProviderUnusable`."""
    for known in reversed(default_interpreters(())):
        if known.executable.startswith("/usr/") or os.geteuid() != 0:
            return known.executable, known.folders
    raise ProviderUnusable("the provider local needs a Python below /usr: apt-get install python3.")


def end_dead_owners() -> None:
    """Ends processes that were making a sandbox when their owner died.

    Until bubblewrap has the rights to, such a process does not end with its parent. The label is among its arguments.
    """
    for process in psutil.process_iter(["cmdline"]):
        labels = [part for part in process.info["cmdline"] or () if part.startswith(f"{OWNER_LABEL}=")]
        if labels and has_died(labels[0].partition("=")[2]):
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                process.kill()
