"""The calls of sessions that are in flight, and the replicas that make them: a state machine without clock and I/O.

A replica's half is `deployments/generation/serving/session_calls_in_flight.py`.

Guarantees: each call that has begun ends once; a call whose replica is silent for longer than its lease has ended.
"""

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(slots=True)
class CallInFlight:
    session_id: str
    replica: str
    heard_at: float
    is_aborted: bool = False
    """Whether its replica must abort it."""


class CallsInFlight:
    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._calls: dict[str, CallInFlight] = {}

    def begin(self, call_id: str, session_id: str, replica: str, now: float) -> None:
        self._calls[call_id] = CallInFlight(session_id, replica, now)

    def end(self, call_id: str) -> str | None:
        """The session of the call; `None` if it has ended already."""
        call = self._calls.pop(call_id, None)
        return None if call is None else call.session_id

    def abort(self, session_ids: Collection[str]) -> None:
        """Lets the replicas abort the calls of these sessions."""
        for call in self._calls.values():
            call.is_aborted |= call.session_id in session_ids

    def heard(self, call_ids: Collection[str], now: float) -> list[str]:
        """A replica makes these calls. Returns those that it must abort, calls that have ended here among them."""
        for call_id in call_ids:
            if (call := self._calls.get(call_id)) is not None:
                call.heard_at = now
        return [name for name in call_ids if name not in self._calls or self._calls[name].is_aborted]

    def lost(self, now: float) -> list[str]:
        """The calls whose replicas were silent for too long."""
        return [name for name, call in self._calls.items() if now - call.heard_at > self._lease_s]
