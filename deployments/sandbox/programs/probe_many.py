"""Leaves a process behind, then uses too much memory by many processes of which each uses little."""

import os
import sys
import time


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
for _ in range(6):
    if os.fork() == 0:
        held = bytearray(b"x") * share
        time.sleep(60)
time.sleep(2)
