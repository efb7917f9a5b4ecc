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

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from deployments.sessions.failures import SessionClosed, SessionLimitReached, session_unknown
from deployments.sessions.journal import ReadSession
from deployments.storage.storage import EntryName
from rollout_client.contract.sessions import SessionLimits, SessionStatus


@dataclass(slots=True, eq=False, kw_only=True)
class KeptSession:
    """A session, in memory or not. Times are on the monotonic clock."""

    id: str
    namespace: str
    limits: SessionLimits
    opened_at: float
    """In seconds since 1970."""
    used_at: float
    use_stored_at: float
    """The last `used_at` that is stored."""
    deadline_at: float | None = None
    is_ended: bool = False
    calls: int = 0
    """Calls that have begun."""
    in_flight: int = 0
    tokens: int = 0
    """Tokens of its record."""
    size_bytes: int = 0
    """Bytes of its record and of what it was opened with."""
    opened_bytes: int = 0
    """Bytes of what it was opened with."""
    names: Collection[EntryName] = ()
    """Its entries, until they are read."""
    read: ReadSession | None = None

    @property
    def expires_at(self) -> float | None:
        """`None` while a call is in flight."""
        return None if self.in_flight else self.used_at + self.limits.idle_s

    def is_beyond_deadline(self, now: float) -> bool:
        return self.deadline_at is not None and now >= self.deadline_at

    def status(self, now: float) -> SessionStatus:
        if self.is_ended:
            return "ended"
        return "deadline" if self.is_beyond_deadline(now) else "open"


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
        """Ends of calls that a replica may still name once."""

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


class SessionTable:
    """The sessions that one store keeps. Methods that drop sessions return their ids.

    Args:
        max_sessions: at least 1.
        max_bytes: bound of all records together.
    """

    def __init__(self, max_sessions: int, max_bytes: int) -> None:
        self._max_sessions = max_sessions
        self._max_bytes = max_bytes
        self.sessions: dict[str, KeptSession] = {}
        """By id, in the order in which they were added."""
        self.size_bytes = 0
        """Bytes of all records."""

    def has(self, session: KeptSession) -> bool:
        return self.sessions.get(session.id) is session

    def add(self, session: KeptSession, size_bytes: int) -> list[str]:
        """Adds a session, and drops others if there are too many or their records are too large together.

        Args:
            size_bytes: of its record as far as it is stored.

        Raises:
            SessionLimitReached: there are too many, and each has a call in flight.
        """
        dropped = []
        if len(self.sessions) >= self._max_sessions:
            counts = Counter(other.namespace for other in self.sessions.values())
            counts[session.namespace] += 1
            if (idle := self._longest_idle(counts)) is None:
                message = f"All {self._max_sessions} sessions have calls in flight: end one, or wait for one"
                raise limit_reached(session, "max_sessions", message)
            dropped.append(self.drop(idle))
        self.sessions[session.id] = session
        return [*dropped, *self.note_record(session, 0, size_bytes)]

    def use(self, session: KeptSession, now: float) -> None:
        session.used_at = now

    def begin_call(self, session: KeptSession, now: float) -> None:
        """Counts a call that begins. One that is refused changes nothing but `used_at`.

        Raises:
            SessionUnknown: the session was dropped.
            SessionClosed: it takes no more calls.
            SessionLimitReached: not this one now.
        """
        if not self.has(session):
            raise session_unknown(session.id)
        self.use(session, now)
        if session.is_ended:
            raise session_closed(session, f"Session {session.id!r} has ended and takes no more calls")
        if session.is_beyond_deadline(now):
            raise session_closed(session, f"The deadline of session {session.id!r} is over")
        limits = session.limits
        for name, value, bound in (
            ("max_calls", session.calls, limits.max_calls),
            ("max_tokens", session.tokens, limits.max_tokens),
            ("max_calls_in_flight", session.in_flight, limits.max_calls_in_flight),
        ):
            if value >= bound:
                message = f"Session {session.id!r} has reached limits.{name}: {value} of {bound}"
                raise limit_reached(session, name, message)
        self._count_call(session)

    def resume_call(self, session: KeptSession, now: float) -> None:
        """Counts a call that has begun before this table was made."""
        self.use(session, now)
        self._count_call(session)

    def end_call(self, session_id: str, now: float) -> None:
        """Unknown ids are ignored."""
        if (session := self.sessions.get(session_id)) is not None:
            self.use(session, now)
            session.in_flight -= 1

    def note_record(self, session: KeptSession, tokens: int, size_bytes: int, calls: int = 0) -> list[str]:
        """Sets the tokens, bytes and calls of the session's whole record, and drops sessions if all records are too
        large together. A session that was dropped is ignored.

        A call that began at an earlier store may be recorded before its replica names it here.
        """
        if not self.has(session):
            return []
        session.tokens = tokens
        session.calls = max(session.calls, calls + session.in_flight)
        self.size_bytes += size_bytes - session.size_bytes
        session.size_bytes = size_bytes
        dropped: list[str] = []
        while self.size_bytes > self._max_bytes:
            kept = Counter[str]()
            for other in self.sessions.values():
                kept[other.namespace] += other.size_bytes
            if (idle := self._longest_idle(kept, has_record=True)) is None:
                break
            dropped.append(self.drop(idle))
        return dropped

    def drop_expired(self, now: float) -> list[str]:
        """Drops the sessions that are idle for longer than their limit."""
        expired = [
            session.id
            for session in self.sessions.values()
            if session.expires_at is not None and now >= session.expires_at
        ]
        return [self.drop(session_id) for session_id in expired]

    def beyond_deadline(self, now: float) -> list[str]:
        """The sessions with calls in flight whose deadline is over: these calls must be aborted."""
        return [
            session.id for session in self.sessions.values() if session.in_flight and session.is_beyond_deadline(now)
        ]

    def drop(self, session_id: str) -> str:
        """Removes the session, whatever it does. Unknown ids are ignored."""
        if (session := self.sessions.pop(session_id, None)) is not None:
            self.size_bytes -= session.size_bytes
        return session_id

    def _count_call(self, session: KeptSession) -> None:
        session.calls += 1
        session.in_flight += 1

    def _longest_idle(self, kept: Mapping[str, int], has_record: bool = False) -> str | None:
        """The longest idle session of the namespace that keeps the most, by `kept`, of those that have one."""
        idle = (session for session in self.sessions.values() if not session.in_flight)
        able = (session for session in idle if not has_record or session.size_bytes)
        longest = max(able, key=lambda session: (kept[session.namespace], -session.used_at), default=None)
        return None if longest is None else longest.id


def session_closed(session: KeptSession, message: str) -> SessionClosed:
    return SessionClosed.of("session_id", message, session.id)


def limit_reached(session: KeptSession, limit: str, message: str) -> SessionLimitReached:
    return SessionLimitReached.of(f"limits.{limit}", message, session.id)
