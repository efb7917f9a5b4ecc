"""The calls of sessions that generator replicas make now. A state machine without clock and I/O.

Guarantees: each call that has begun ends once; a call whose replica is silent for longer than its lease is lost, unless
the replica is heard again. A store that starts again knows of no call: it takes over those that replicas name. A
replica's half is `deployments/generation/serving/session_calls_in_flight.py`.

Times are in seconds of any monotonic clock.
"""

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(slots=True)
class _CallInFlight:
    session_id: str
    heard_at: float
    is_aborted: bool = False
    """Whether its replica must abort it."""


class CallsInFlight:
    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._calls: dict[str, _CallInFlight] = {}
        self._ended_at: dict[str, float] = {}
        """Ends of calls that a replica may still name once."""

    def __contains__(self, call_id: str) -> bool:
        return call_id in self._calls

    def begin(self, call_id: str, session_id: str, now: float) -> None:
        self._calls[call_id] = _CallInFlight(session_id, now)

    def end(self, call_id: str, now: float) -> str | None:
        """The session of the call; `None` if it is not in flight."""
        self._ended_at[call_id] = now
        call = self._calls.pop(call_id, None)
        return None if call is None else call.session_id

    def has_ended(self, call_id: str) -> bool:
        """Whether the call has ended since about a lease ago."""
        return call_id in self._ended_at

    def abort(self, session_ids: Collection[str]) -> None:
        """Lets the replicas abort the calls of these sessions."""
        for call in self._calls.values():
            call.is_aborted |= call.session_id in session_ids

    def heard(self, call_ids: Collection[str], now: float) -> list[str]:
        """A replica makes these calls. Returns those that it must abort, calls that are not in flight here among
        them."""
        for call_id in call_ids:
            if (call := self._calls.get(call_id)) is not None:
                call.heard_at = now
        return [name for name in call_ids if name not in self._calls or self._calls[name].is_aborted]

    def lost(self, now: float) -> list[str]:
        """The session of each call whose replica was silent for too long. These calls are no longer in flight."""
        silent = [name for name, call in self._calls.items() if now - call.heard_at > self._lease_s]
        self._ended_at = {name: at for name, at in self._ended_at.items() if now - at <= self._lease_s}
        return [self._calls.pop(name).session_id for name in silent]
