"""The longest gap of the event loop of a running ingress replica, measured in its own process."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.loop_probe import LoopProbe
from tests.endurance.replica_actors import done_in, event_loop_of, replica_actors

INGRESS = "Ingress"
ATTRIBUTE = "_loop_probe"


@dataclass(frozen=True, slots=True)
class Gap:
    cpu_ms: float
    """Processor time of the event loop's thread."""
    wall_ms: float
    """The longest in wall time, which may be another gap."""
    executed: str
    """What took most of the processor time; empty if nobody looked."""
    new_replicas: int
    """Those that started after the probe did: they took the place of others."""


class IngressProbe:
    """Of all ingress replicas. A probe is put into a replica when it is first asked.

    Args:
        with_stacks: a thread in the replica looks what is executed, which makes gaps longer.
    """

    def __init__(self, with_stacks: bool) -> None:
        self._with_stacks = with_stacks

    def restart(self) -> None:
        for replica in replica_actors()[INGRESS]:
            done_in(replica, partial(restart_probe, with_stacks=self._with_stacks))

    def longest_gap(self) -> Gap:
        """Since the last restart."""
        asked = [done_in(replica, probe_gaps) for replica in replica_actors()[INGRESS]]
        found = [gaps for gaps in asked if gaps is not None]
        new_replicas = len(asked) - len(found)
        if not found:
            return Gap(0.0, 0.0, "", new_replicas)
        longest = max(found, key=lambda gaps: gaps["cpu_ms"])
        executed = max(longest["stacks"], key=longest["stacks"].__getitem__, default="")
        return Gap(longest["cpu_ms"], max(gaps["wall_ms"] for gaps in found), executed, new_replicas)


def restart_probe(replica: Any, with_stacks: bool) -> None:
    """Runs in the replica's process, and not in its event loop."""
    probe = getattr(replica, ATTRIBUTE, None)
    if probe is None:
        probe = LoopProbe(with_stacks)
        setattr(replica, ATTRIBUTE, probe)
    event_loop_of(replica).call_soon_threadsafe(probe.restart)


def probe_gaps(replica: Any) -> dict[str, Any] | None:
    """`None` of a replica without a probe."""
    probe: LoopProbe | None = getattr(replica, ATTRIBUTE, None)
    return None if probe is None else probe.gaps()
