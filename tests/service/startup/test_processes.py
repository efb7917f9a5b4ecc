"""What becomes of the processes that a service adopts."""

import subprocess
import sys

ADOPTS_AND_REAPS = """
import subprocess, sys, time
import psutil
from service.startup.processes import OrphanReaper, adopt_orphans

def until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)

adopt_orphans()
reaper, me = OrphanReaper(), psutil.Process()
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


def test_an_adopted_process_that_has_ended_is_reaped_and_a_child_of_ones_own_is_not() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ADOPTS_AND_REAPS], capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == 0, done.stderr
