"""Leaves a process behind, then uses too much memory by many processes of which each uses little."""

import os
import sys
import time

PROCESSES = 6


def leave_behind() -> None:
    """Starts a process that has no parent, no session and no files in common with this one."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.closerange(0, 64)
            time.sleep(60)
        os._exit(0)


leave_behind()
share = int(sys.argv[1])
filled, filled_by_child = os.pipe()
for _ in range(PROCESSES):
    if os.fork() == 0:
        held = bytearray(b"x") * share
        os.write(filled_by_child, b".")
        time.sleep(60)
os.close(filled_by_child)
# On a busy machine it takes seconds until all of it is used.
for _ in range(PROCESSES):
    if not os.read(filled, 1):
        sys.exit("A process could not use its share of memory.")
time.sleep(float(sys.argv[3]))
