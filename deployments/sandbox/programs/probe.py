"""Tries, from inside, what the walls should prevent. It is a program of the sandbox: the standard library alone.

probe.py alone KNOWN        prints as JSON for each wall whether it stands; KNOWN is what must be out of reach
probe.py many KNOWN TOKEN   leaves a process behind, then uses too much memory by many processes, a share each
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

PROCESSES = 6


def refused(attempt: Callable[[], object], *errors: type[BaseException]) -> bool:
    """Whether the attempt raised one of the errors, which are kinds of `OSError` by default."""
    try:
        attempt()
    except errors or (OSError,):  # noqa: B030
        return True
    return False


def connect_over_tcp(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=2):
        pass


def connect_abstract(name: str) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(2)
        client.connect("\0" + name)


def sees(pid: int, started_at: str) -> bool:
    """Whether the process of the service is in `/proc`, with the time at which it was started."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[19] == started_at
    except OSError:
        return False


def signals(pid: int, started_at: str) -> bool:
    """Whether a signal would reach the service. In a namespace of its own the same number is another process."""
    return sees(pid, started_at) and not refused(lambda: os.kill(pid, 0))


def allocate(count: int) -> bytearray:
    return bytearray(count)


def most_processes(limit: int) -> int:
    """How many processes this one can start, at most 8 more than `limit`."""
    children: list[int] = []
    try:
        while len(children) < limit + 8:
            child = os.fork()
            if child == 0:
                signal.pause()
            children.append(child)
    except OSError:
        pass
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return len(children)


def write(path: str, count: int) -> None:
    with open(path, "wb", buffering=0) as file:
        while count > 0:
            count -= file.write(bytes(min(count, 65536)))


def fill(limit: int, file_limit: int) -> None:
    """Writes files until `limit` is exceeded. Raises OSError before that if the wall stands."""
    try:
        for number in range(limit // file_limit + 2):
            write(f"fill{number}", file_limit)
    finally:
        for name in os.listdir("."):
            if name.startswith("fill"):
                os.unlink(name)


def try_alone(known: dict[str, Any]) -> None:
    pid, started_at = known["service"]
    # The service looks whether it appears beside its own file.
    refused(lambda: write(known["file"] + ".written", 1))
    walls = {
        "network": refused(lambda: connect_over_tcp(known["port"]))
        and refused(lambda: connect_abstract(known["abstract_socket"])),
        "files": refused(lambda: open(known["file"])) and refused(lambda: write("/usr/written", 1)),
        "service_processes": not sees(pid, started_at) and not signals(pid, started_at),
        "environment_variables": known["variable"] not in os.environ,
        "system_calls": refused(lambda: os.memfd_create("probe")),
        "processor_time": resource.getrlimit(resource.RLIMIT_CPU)[1] <= known["processor_time_s"] + 1,
        "memory": refused(lambda: allocate(2 * known["memory_bytes"]), MemoryError),
        "process_count": most_processes(known["processes"]) <= known["processes"],
        "file_size": refused(lambda: write("large", known["file_bytes"] + 1)),
        "disk": refused(lambda: fill(known["disk_bytes"], known["file_bytes"])),
    }
    print(json.dumps(walls))


def leave_behind() -> None:
    """Starts a process that has no parent, no session and no files in common with this one."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.closerange(0, 64)
            time.sleep(60)
        os._exit(0)


def try_by_many(known: dict[str, Any]) -> None:
    leave_behind()
    filled, filled_by_child = os.pipe()
    for _ in range(PROCESSES):
        if os.fork() == 0:
            held = bytearray(b"x") * known["share"]  # noqa: F841
            os.write(filled_by_child, b".")
            time.sleep(60)
    os.close(filled_by_child)
    # On a busy machine it takes seconds until all of it is used.
    for _ in range(PROCESSES):
        if not os.read(filled, 1):
            sys.exit("A process could not use its share of memory.")
    time.sleep(known["wait_s"])


{"alone": try_alone, "many": try_by_many}[sys.argv[1]](json.loads(sys.argv[2]))
