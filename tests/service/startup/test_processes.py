"""What becomes of the processes that a service adopts."""

import os
import subprocess
import sys
import time
from functools import partial

import psutil
import pytest

from service.startup.processes import wait_for_ends
from tests.growing_limits import in_the_middle

ADOPTS_AND_REAPS = """
import subprocess, sys, time
import psutil
from service.startup.processes import _OrphanReaper, adopt_orphans

def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)

adopt_orphans()
reaper, me = _OrphanReaper(), psutil.Process()
shell = ["sh", "-c", "sleep 1000 & echo $!; read line"]
parent = subprocess.Popen(shell, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
orphan = psutil.Process(int(parent.stdout.readline()))
reaper.reap()
own = subprocess.Popen(["sh", "-c", "exit 3"])
parent.stdin.close()
parent.wait()
until(lambda: orphan.ppid() == me.pid)
orphan.kill()
until(lambda: orphan.status() == psutil.STATUS_ZOMBIE)
until(lambda: psutil.Process(own.pid).status() == psutil.STATUS_ZOMBIE)
reaper.reap()
assert orphan not in me.children(), "the orphan that has ended is still there"
assert own.wait() == 3, "the exit code of a child was taken"
"""


def test_an_adopted_process_that_has_ended_is_reaped() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ADOPTS_AND_REAPS], capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_process_that_is_being_reaped_counts_as_running_until_it_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    opened, tries = os.pidfd_open, []

    def open_late(pid: int, *flags: int) -> int:
        tries.append(pid)
        # The second time it is a zombie, of which psutil makes another error.
        if tries.count(pid) <= 2 and pid != os.getpid():
            time.sleep(0.2 * (tries.count(pid) - 1))
            raise FileNotFoundError(2, "No such file or directory")
        return opened(pid, *flags)

    monkeypatch.setattr(os, "pidfd_open", open_late)
    with subprocess.Popen(["sleep", "0.1"]) as ending, subprocess.Popen(["sleep", "1000"]) as staying:
        processes = [psutil.Process(process.pid) for process in (ending, staying)]
        try:
            left = in_the_middle(partial(wait_for_ends, processes), has_begun=lambda left: left == processes[1:])
            assert left == processes[1:]
            assert tries.count(staying.pid) > 1
        finally:
            staying.kill()
