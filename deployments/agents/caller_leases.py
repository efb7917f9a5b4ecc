"""Which ingress replicas have runs here, and which of them are gone: a state machine without clock and I/O.

Guarantee: the runs of a caller that was not heard of for `lease_s` seconds are lost, once.
"""

from collections.abc import Collection
from dataclasses import dataclass, field


@dataclass(slots=True)
class CallerLease:
    heard_at: float
    runs: set[str] = field(default_factory=set)


class CallerLeases:
    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._leases: dict[str, CallerLease] = {}
        """Of callers that have runs."""

    def begin(self, caller: str, runs: Collection[str], now: float) -> None:
        lease = self._leases.setdefault(caller, CallerLease(now))
        lease.heard_at = now
        lease.runs.update(runs)

    def end(self, caller: str, runs: Collection[str]) -> None:
        """Unknown ones are ignored."""
        if (lease := self._leases.get(caller)) is not None:
            lease.runs.difference_update(runs)
            if not lease.runs:
                del self._leases[caller]

    def heard(self, caller: str, now: float) -> None:
        if (lease := self._leases.get(caller)) is not None:
            lease.heard_at = now

    def lost(self, now: float) -> list[str]:
        """The runs of callers that are gone."""
        gone = [caller for caller, lease in self._leases.items() if now - lease.heard_at > self._lease_s]
        return [run for caller in gone for run in self._leases.pop(caller).runs]

    def __len__(self) -> int:
        return len(self._leases)
