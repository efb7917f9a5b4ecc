"""Which sessions there are, what they may still do, and when each is dropped; and their calls in flight.

State machines without clock and I/O. Guarantees of `SessionTable`: a session with a call in flight is dropped neither
for its age nor for room; room is made by the namespace that keeps the most, which loses the session that is idle for
the longest time first; `drop_expired` leaves no idle session beyond its time; the records together are larger than
`max_bytes` only if all sessions that have a record have calls in flight.

Guarantees of `CallsInFlight`: each call that has begun ends once; a call whose replica is silent for longer than its
lease is lost, unless the replica is heard again. A store that starts anew knows of no call: it takes those over that
replicas name. A replica's half is `deployments/generation/serving/session_calls_in_flight.py`.

Times are in seconds of any monotonic clock.
"""

from collections import Counter, OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from rollout_client.contract.sessions import SessionLimits


@dataclass(slots=True)
class CallInFlight:
    session_id: str
    heard_at: float
    is_aborted: bool = False
    """Whether its replica must abort it."""


class CallsInFlight:
    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._calls: dict[str, CallInFlight] = {}
        self._ended_at: dict[str, float] = {}
        """Of calls that have ended: a replica may still name them once."""

    def __contains__(self, call_id: str) -> bool:
        return call_id in self._calls

    def begin(self, call_id: str, session_id: str, now: float) -> None:
        self._calls[call_id] = CallInFlight(session_id, now)

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

    def lost(self, now: float) -> list[tuple[str, str]]:
        """The calls whose replicas were silent for too long, each with its session. They are no longer in flight."""
        silent = [name for name, call in self._calls.items() if now - call.heard_at > self._lease_s]
        self._ended_at = {name: at for name, at in self._ended_at.items() if now - at <= self._lease_s}
        return [(name, self._calls.pop(name).session_id) for name in silent]


Refusal = Literal["unknown", "ended", "deadline", "max_calls", "max_tokens", "max_calls_in_flight"]


class SessionRefused(Exception):
    """A session, or a call of one, that may not begin."""

    def __init__(self, reason: Refusal | Literal["max_sessions"], message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(slots=True, eq=False)
class SessionUse:
    """What the table knows of one session."""

    namespace: str
    limits: SessionLimits
    used_at: float
    deadline_at: float | None
    is_ended: bool = False
    calls: int = 0
    """Calls that have begun."""
    in_flight: int = 0
    tokens: int = 0
    """Of its record."""
    size_bytes: int = 0
    """Of its record."""

    @property
    def expires_at(self) -> float | None:
        """`None` while a call is in flight."""
        return None if self.in_flight else self.used_at + self.limits.idle_s


class SessionTable:
    """The sessions whose records one store keeps."""

    def __init__(self, max_sessions: int, max_bytes: int) -> None:
        """Args: `max_bytes` bounds all records together, `max_sessions` how many there are (>= 1)."""
        self._max_sessions = max_sessions
        self._max_bytes = max_bytes
        self._sessions: OrderedDict[str, SessionUse] = OrderedDict()
        """The one that was used longest ago first."""
        self.size_bytes = 0
        """Of all records."""

    def __len__(self) -> int:
        return len(self._sessions)

    def __contains__(self, session_id: str) -> bool:
        return session_id in self._sessions

    def get(self, session_id: str) -> SessionUse:
        """Raises `SessionRefused`: there is no such session, or no longer."""
        if (session := self._sessions.get(session_id)) is None:
            raise SessionRefused("unknown", f"There is no session {session_id!r}: it has expired, or never was.")
        return session

    def open(
        self,
        session_id: str,
        limits: SessionLimits,
        now: float,
        deadline_s: float | None = None,
        namespace: str = "",
        size_bytes: int = 0,
    ) -> list[str]:
        """Adds a session, and drops others if there are too many, or their records are too large together.

        Args:
            size_bytes: of what it was opened with, a part of its record.

        Returns the ids of those that were dropped.

        Raises:
            SessionRefused: there are too many, and each has a call in flight.
        """
        dropped = []
        if len(self._sessions) >= self._max_sessions:
            sessions = Counter(session.namespace for session in self._sessions.values())
            sessions[namespace] += 1
            if (idle := self._longest_idle(sessions)) is None:
                raise SessionRefused(
                    "max_sessions", f"All {self._max_sessions} sessions have calls in flight: end one, or wait for one."
                )
            dropped.append(self.drop(idle))
        deadline_at = None if deadline_s is None else now + deadline_s
        self._sessions[session_id] = SessionUse(namespace, limits, now, deadline_at)
        return [*dropped, *self.note_record(session_id, 0, size_bytes)]

    def restore(self, session_id: str, session: SessionUse, size_bytes: int) -> list[str]:
        """Adds a session that was opened before, after those that were used before it.

        Returns the ids of those that were dropped because there are too many, or their records are too large.
        """
        self._sessions[session_id] = session
        dropped = []
        if len(self._sessions) > self._max_sessions:
            sessions = Counter(other.namespace for other in self._sessions.values())
            if (idle := self._longest_idle(sessions)) is not None:
                dropped.append(self.drop(idle))
        return [*dropped, *self.note_record(session_id, 0, size_bytes)]

    def use(self, session_id: str, now: float) -> SessionUse:
        """Notes that something was asked of the session. Raises `SessionRefused` if there is none."""
        session = self.get(session_id)
        session.used_at = now
        self._sessions.move_to_end(session_id)
        return session

    def begin_call(self, session_id: str, now: float) -> None:
        """Raises `SessionRefused` if the session may not begin another call; then nothing has changed but its time."""
        session = self.use(session_id, now)
        limits = session.limits
        if session.is_ended:
            raise SessionRefused("ended", f"Session {session_id!r} has ended and takes no more calls.")
        if session.deadline_at is not None and now >= session.deadline_at:
            raise SessionRefused("deadline", f"The deadline of session {session_id!r} is over.")
        bounds: list[tuple[Refusal, int, int]] = [
            ("max_calls", session.calls, limits.max_calls),
            ("max_tokens", session.tokens, limits.max_tokens),
            ("max_calls_in_flight", session.in_flight, limits.max_calls_in_flight),
        ]
        for name, value, bound in bounds:
            if value >= bound:
                raise SessionRefused(name, f"Session {session_id!r} has reached limits.{name}: {value} of {bound}.")
        session.calls += 1
        session.in_flight += 1

    def resume_call(self, session_id: str, now: float) -> None:
        """Counts a call that has begun before this table was made. Raises `SessionRefused` if there is no session."""
        session = self.use(session_id, now)
        session.calls += 1
        session.in_flight += 1

    def end_call(self, session_id: str, now: float) -> None:
        """Notes the end of a call. Unknown ids are ignored."""
        if session_id in self._sessions:
            self.use(session_id, now).in_flight -= 1

    def note_record(self, session_id: str, tokens: int, size_bytes: int, calls: int = 0) -> list[str]:
        """Notes the tokens, bytes and calls of the session's whole record.

        A call that began at a store which was here before may be recorded before its replica names it here.

        Returns the ids of sessions that were dropped because all records were too large. Unknown ids are ignored.
        """
        if (session := self._sessions.get(session_id)) is None:
            return []
        session.tokens = tokens
        session.calls = max(session.calls, calls + session.in_flight)
        self.size_bytes += size_bytes - session.size_bytes
        session.size_bytes = size_bytes
        dropped: list[str] = []
        while self.size_bytes > self._max_bytes:
            kept = Counter[str]()
            for other in self._sessions.values():
                kept[other.namespace] += other.size_bytes
            if (idle := self._longest_idle(kept, has_record=True)) is None:
                break
            dropped.append(self.drop(idle))
        return dropped

    def end(self, session_id: str, now: float) -> None:
        """Lets the session take no more calls; its record stays until it expires. Raises `SessionRefused`."""
        self.use(session_id, now).is_ended = True

    def drop_expired(self, now: float) -> list[str]:
        """Drops the sessions that are idle for longer than their limit, and returns their ids."""
        expired = [
            session_id
            for session_id, session in self._sessions.items()
            if session.expires_at is not None and now >= session.expires_at
        ]
        return [self.drop(session_id) for session_id in expired]

    def beyond_deadline(self, now: float) -> list[str]:
        """The sessions with calls in flight whose deadline is over: these calls must be aborted."""
        return [
            session_id
            for session_id, session in self._sessions.items()
            if session.in_flight and session.deadline_at is not None and now >= session.deadline_at
        ]

    def drop(self, session_id: str) -> str:
        """Forgets the session, whatever it does. Unknown ids are ignored."""
        if (session := self._sessions.pop(session_id, None)) is not None:
            self.size_bytes -= session.size_bytes
        return session_id

    def _longest_idle(self, kept: Mapping[str, int], has_record: bool = False) -> str | None:
        """Of the namespace that keeps the most, by `kept`, of those that have an idle session."""
        idle = (name for name, session in self._sessions.items() if not session.in_flight)
        able = (name for name in idle if not has_record or self._sessions[name].size_bytes)
        return max(able, key=lambda name: kept[self._sessions[name].namespace], default=None)
