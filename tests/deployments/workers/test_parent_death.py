"""Processes of an engine, each started by the one before, of which the first is killed."""

import multiprocessing
import signal
import subprocess
import sys
from multiprocessing.connection import Connection

import psutil
import pytest

from deployments.workers.cleanup import die_with_parent
from service.startup.processes import wait_for_ends

pytestmark = pytest.mark.slow

GONE_WITHIN_S = 40.0
REPLICA = """
from multiprocessing import Pipe, get_context
from tests.deployments.workers import test_parent_death

receiver, sender = Pipe(duplex=False)
get_context("{method}").Process(target=test_parent_death.{target}, args=(sender, 1)).start()
print(*receiver.recv(), flush=True)
input()
"""


def engine_process(told: Connection, below: int) -> None:
    """Starts `below` further processes, each below the one before, tells their ids and its own, and sleeps."""
    die_with_parent()
    ids = [multiprocessing.current_process().pid]
    receiver, sender = multiprocessing.Pipe(duplex=False)
    if below:
        multiprocessing.Process(target=engine_process, args=(sender, below - 1)).start()
        ids += receiver.recv()
    told.send(ids)
    signal.pause()


def late_process(told: Connection, _below: int) -> None:
    """Asks Linux for its end when its parent has died already."""
    told.send([multiprocessing.current_process().pid])
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    die_with_parent()
    signal.pause()


def alive_after_the_replica(method: str, target: str, *, are_stopped: bool) -> list[psutil.Process]:
    """The engine's processes that do not end with the replica; they are ended."""
    program = [sys.executable, "-c", REPLICA.format(method=method, target=target)]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as replica:
        assert replica.stdout is not None
        engine = [psutil.Process(int(pid)) for pid in replica.stdout.readline().split()]
        assert engine
        for process in engine if are_stopped else ():
            process.suspend()
        replica.kill()
        alive = wait_for_ends(engine, GONE_WITHIN_S)
        for process in alive:
            process.kill()
    return alive


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_the_engines_processes_end_with_a_killed_replica(method: str) -> None:
    assert alive_after_the_replica(method, "engine_process", are_stopped=True) == []


def test_a_process_whose_replica_has_died_while_it_started_ends() -> None:
    assert alive_after_the_replica("spawn", "late_process", are_stopped=False) == []
