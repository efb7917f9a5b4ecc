"""The longest gap of the event loop of a running ingress replica, measured in its own process."""

from dataclasses import dataclass
from typing import Any

from benchmarks.loop_probe import LoopProbe
from tests.endurance.replica_actors import done_in, event_loop_of, replica_actors

INGRESS = "Ingress"
ATTRIBUTE = "_loop_probe"


@dataclass(frozen=True, slots=True)
class Gap:
    cpu_ms: float
    """Processor time of the event loop's thread."""
    new_replicas: int
    """Those that started after the probe did: they took the place of others."""


class IngressProbe:
    """Of all ingress replicas. A probe is put into a replica when it is first asked."""

    def restart(self) -> None:
        for replica in replica_actors()[INGRESS]:
            done_in(replica, restart_probe)

    def longest_gap(self) -> Gap:
        """Since the last restart."""
        asked = [done_in(replica, probe_gaps) for replica in replica_actors()[INGRESS]]
        found = [gaps["cpu_ms"] for gaps in asked if gaps is not None]
        return Gap(max(found, default=0.0), len(asked) - len(found))


def restart_probe(replica: Any) -> None:
    """Runs in the replica's process, and not in its event loop."""
    probe = getattr(replica, ATTRIBUTE, None)
    if probe is None:
        probe = LoopProbe(False)
        setattr(replica, ATTRIBUTE, probe)
    event_loop_of(replica).call_soon_threadsafe(probe.restart)


def probe_gaps(replica: Any) -> dict[str, Any] | None:
    """`None` of a replica without a probe."""
    probe: LoopProbe | None = getattr(replica, ATTRIBUTE, None)
    return None if probe is None else probe.gaps()
