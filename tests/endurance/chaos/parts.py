"""The parts of a service that are struck, each found among the processes below this one."""

import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import psutil

from benchmarks.process_group import command_of, is_engine, parent_of

TASK_NAME = "sliding_puzzle"


@dataclass(frozen=True, slots=True)
class Part:
    is_one: Callable[[psutil.Process], bool]
    """Whether a process is such a part."""
    deployment: str | None = None
    """Whose replica is replaced when it has died; `None` if no replica is."""
    sent: signal.Signals | None = signal.SIGKILL
    """What is sent to it: killed it is gone at once, stopped it hangs. `None`: Serve shuts one of its replicas down."""

    def processes(self) -> list[psutil.Process]:
        """Those that live, the oldest first."""
        found = [process for process in psutil.Process().children(recursive=True) if self.is_one(process)]
        return sorted(found, key=lambda process: process.create_time())


def command_contains(mark: str, process: psutil.Process) -> bool:
    # The command line of a zombie is empty.
    return mark in command_of(process)


def replica_of(deployment: str) -> Part:
    return Part(partial(command_contains, f"ServeReplica:rollout:{deployment}"), deployment)


def is_engine_core(process: psutil.Process) -> bool:
    """A child of a generator replica, and the parent of its workers."""
    return is_engine(process) and not is_engine_worker(process)


def is_engine_worker(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return is_engine(process) and is_engine(psutil.Process(parent_of(process)))
    return False


KILLED = {
    "generator": replica_of("Generator"),
    "ingress": replica_of("Ingress"),
    "engine-core": Part(is_engine_core, "Generator"),
    "environment": replica_of(TASK_NAME),
    "store": replica_of("Policy"),
    "jobs": replica_of("Jobs"),
    "engine-worker": Part(is_engine_worker, "Generator"),
    "controller": Part(partial(command_contains, "ServeController")),
}
"""By the kind of a round, in the order in which they take turns: others are killed while an engine starts."""
STOPPED = {
    f"{kind}-stopped": replace(KILLED[kind], sent=signal.SIGSTOP)
    for kind in ("engine-core", "environment", "engine-worker", "generator")
}
DRAINED = {f"{kind}-drained": replace(KILLED[kind], sent=None) for kind in ("generator", "environment", "ingress")}
PARTS = KILLED | STOPPED | DRAINED
