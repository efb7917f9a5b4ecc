"""Tries, from inside, what the walls should prevent. It is a program of the sandbox: the standard library alone.

Its arguments are JSON, what must be out of reach, and a token. It prints as JSON whether each wall stands. Then it
leaves a process behind, and uses too much memory by several processes, a share each.
"""

import json
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any


def _refused(attempt: Callable[[], object]) -> bool:
    try:
        attempt()
    except OSError:
        return True
    return False


def _connect(family: socket.AddressFamily, address: Any) -> None:
    with socket.socket(family) as client:
        client.settimeout(2)
        client.connect(address)


def _sees(pid: int, started_at: str) -> bool:
    """Whether the process of the service is in `/proc`: in a namespace the same number is another process."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[19] == started_at
    except OSError:
        return False


def _bounded(name: str, limit: float) -> bool:
    return os.getuid() != 0 and resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))[1] <= limit


def _most_processes(limit: int) -> int:
    """The number of processes that this one can start, at most 8 more than `limit`."""
    children: list[int] = []
    while len(children) < limit + 8:
        try:
            child = os.fork()
        except OSError:
            break
        if child == 0:
            signal.pause()
        children.append(child)
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return len(children)


def _write(path: str) -> None:
    with open(path, "wb") as file:
        file.write(b"x")


def _try_walls(known: dict[str, Any]) -> None:
    # The service looks whether it appears beside its own file.
    _refused(lambda: _write(known["file"] + ".written"))
    volume = os.statvfs(".")
    walls = {
        "network": _refused(lambda: _connect(socket.AF_INET, ("127.0.0.1", known["port"])))
        and _refused(lambda: _connect(socket.AF_UNIX, "\0" + known["abstract_socket"])),
        "files": _refused(lambda: open(known["file"])) and _refused(lambda: _write("/usr/written")),
        "service_processes": not _sees(*known["service"]),
        "environment_variables": known["variable"] not in os.environ,
        "system_calls": _refused(lambda: os.memfd_create("probe")),
        "processor_time": _bounded("CPU", known["processor_time_s"] + 1),
        "memory": _bounded("AS", known["memory_bytes"]),
        "process_count": _most_processes(known["processes"]) <= known["processes"],
        "file_size": _bounded("FSIZE", known["file_bytes"]),
        "disk": volume.f_blocks * volume.f_frsize <= known["disk_bytes"],
    }
    print(json.dumps(walls), flush=True)


def _leave_behind() -> None:
    """Starts a process that has no parent, no session and no files in common with this one."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.closerange(0, 64)
            time.sleep(60)
        os._exit(0)


def _use_memory(known: dict[str, Any]) -> None:
    """Holds twice the permitted memory in four processes, until the first one ends the run."""
    os.fork()
    os.fork()
    held = bytearray(b"x") * (known["memory_bytes"] // 2)  # noqa: F841
    time.sleep(known["wait_s"])


KNOWN = json.loads(sys.argv[1])
_try_walls(KNOWN)
_leave_behind()
_use_memory(KNOWN)
