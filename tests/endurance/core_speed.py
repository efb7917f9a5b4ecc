"""How fast a core of this machine is at this moment, so that bounds in milliseconds mean the same on slower ones."""

import time

ADDITIONS = 1_000_000
USUAL_S = 0.016
"""What they take on a core of usual speed: 60 million in a second."""
TRIES = 10


def core_speed() -> float:
    """The speed of a core when it executes Python, as a share of the usual speed; 1.0 at most.

    The best of `TRIES` counts, so that what other processes do at the same time is not taken for a slow core.
    """
    return min(1.0, USUAL_S / min(seconds_for_additions() for _ in range(TRIES)))


def seconds_for_additions() -> float:
    began = time.thread_time()
    total = 0
    for number in range(ADDITIONS):
        total += number
    return time.thread_time() - began
