"""The longest gap of the event loop of the ingress replicas of the running service, measured in their own processes."""

from typing import Any

from benchmarks.loop_probe import LoopProbe
from tests.endurance.replica_actors import done_in, event_loop_of, replica_actors

INGRESS = "Ingress"
ATTRIBUTE = "_loop_probe"


def restart() -> None:
    """A probe is put into a replica when it is first asked."""
    for replica in replica_actors()[INGRESS]:
        done_in(replica, restart_probe)


def longest_gap() -> tuple[float, int]:
    """Since the last restart, in milliseconds of the processor time of the event loop's thread.

    The second number is that of the replicas that started after the probes did: they took the place of others.
    """
    gaps = [done_in(replica, probe_gap) for replica in replica_actors()[INGRESS]]
    return max((gap for gap in gaps if gap is not None), default=0.0), gaps.count(None)


def restart_probe(replica: Any) -> None:
    """Runs in the replica's process, and not in its event loop."""
    if not hasattr(replica, ATTRIBUTE):
        setattr(replica, ATTRIBUTE, LoopProbe())
    event_loop_of(replica).call_soon_threadsafe(getattr(replica, ATTRIBUTE).restart)


def probe_gap(replica: Any) -> float | None:
    """`None` of a replica without a probe."""
    return getattr(replica, ATTRIBUTE).gaps()["cpu_ms"] if hasattr(replica, ATTRIBUTE) else None
