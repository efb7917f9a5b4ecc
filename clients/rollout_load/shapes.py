"""How many users there are at a time, of `--users` and within `--run-time`; `constant` is locust's own. Pure.

ramp    one more after the other until 80% of the time is over: at how many does latency turn?
spike   a fifth of the users, all of them for the fifth of the time in the middle: does it come back?
soak    all of them after 5% of the time, until the end: does throughput hold? The summary compares its quarters
"""

from math import ceil

SHAPES = ("constant", "ramp", "spike", "soak")
RAMP_PART = 0.8
SPIKE_BASE = 0.2
SPIKE_BEGINS, SPIKE_ENDS = 0.4, 0.6
SOAK_CLIMB = 0.05


def users_at(shape: str, elapsed: float, peak: int) -> int:
    """The users of `shape` when this part of the time is over; at least one, at most `peak`."""
    if shape == "ramp":
        wanted = ceil(peak * elapsed / RAMP_PART)
    elif shape == "spike":
        wanted = peak if SPIKE_BEGINS <= elapsed < SPIKE_ENDS else ceil(peak * SPIKE_BASE)
    elif shape == "soak":
        wanted = ceil(peak * elapsed / SOAK_CLIMB)
    else:
        wanted = peak
    return min(max(wanted, 1), peak)
