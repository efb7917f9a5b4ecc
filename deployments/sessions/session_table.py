"""The sessions of one store: which are kept, what each may still do, and what of them must be stored.

A state machine without clock and I/O. Times are in seconds of a monotonic clock, whose zero was at `zero_at`, in
seconds since 1970: the clock that tells those may be set, and each store has another zero. Guarantees:
- A session with a call in flight is dropped neither for its age nor for room.
- A call whose replica is silent for longer than its lease is no longer in flight, unless the replica is heard again. A
  table that starts again knows of no call: it takes over those that replicas name. A replica's half is
  `deployments/generation/serving/session_call.py`.
- A call that its replica has ended is not begun again by a word of it that comes up to a lease later.
- Room is made by the namespace that keeps the most: its session that is idle for the longest time goes first.
- The records together are larger than `max_bytes` only if all sessions that have a record have calls in flight.
- A session that was dropped is in `unstored` until its removal is stored.
- A session that is not in memory is read once. Until then it is known by its head: its limits, its age, what it used.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from deployments.sessions.codec import FORM, OPENED, ReadSession, SessionHead, head_bytes, head_of
from deployments.sessions.failures import SessionClosed, SessionLimitReached, session_unknown
from deployments.sessions.records import OpenSession
from deployments.sessions.settings import SessionsSettings
from deployments.storage.storage import EntryName, StoredChange, StoredRecord
from rollout_client.contract.sessions import SessionStatus

USE_STORED_S = 30.0
"""How often it is stored that a session was used, where nothing else of it is."""
_GRACE_S = 60.0
"""No session expires sooner after the start of a store: nobody could use it while there was none."""
_TOO_LARGE = "it is larger than sessions.max_bytes leaves room for; shorten it"


@dataclass(slots=True, eq=False, kw_only=True)
class KeptSession:
    """A session, in memory or not."""

    id: str
    head: SessionHead
    """As it is now: its `calls` are all that have begun."""
    use_stored_at: float
    """The last `used_at` that is stored."""
    in_flight: dict[str, float] = field(default_factory=dict)
    """When the replica of each call was last heard of, by the call's id."""
    ended: dict[str, float] = field(default_factory=dict)
    """When calls ended that a late word of their replica may still name, by the call's id."""
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
        return None if self.in_flight else self.head.used_at + self.head.limits.idle_s

    def status(self, now: float) -> SessionStatus:
        if self.head.is_ended:
            return "ended"
        return "deadline" if self.head.deadline_at is not None and now >= self.head.deadline_at else "open"


class SessionTable:
    def __init__(self, settings: SessionsSettings, stored: Iterable[StoredRecord], now: float, zero_at: float) -> None:
        self._lease_s = settings.lease_s
        self._max_sessions = settings.max_sessions
        self._max_bytes = settings.max_bytes
        self.sessions: dict[str, KeptSession] = {}
        """By id, in the order in which they were opened."""
        self.size_bytes = 0
        """Bytes of all records, and of what their sessions were opened with."""
        heads = [(record, head_of(record.record, zero_at)) for record in stored]
        self._dropped = {record.record_id for record, head in heads if head.form != FORM}
        for record, head in sorted(heads, key=lambda pair: pair[1].used_at):
            if head.form == FORM:
                self._restore(record, head, now)
        self.sessions = dict(sorted(self.sessions.items(), key=lambda item: item[1].head.opened_at))

    def get(self, session_id: str, namespace: str | None = None) -> KeptSession:
        """Raises `SessionUnknown`, also for a session of another caller than `namespace`, if that is given."""
        kept = self.sessions.get(session_id)
        if kept is None or namespace not in (None, kept.head.namespace):
            raise session_unknown(session_id)
        return kept

    def has(self, kept: KeptSession) -> bool:
        return self.sessions.get(kept.id) is kept

    def still_kept(self, kept: KeptSession) -> KeptSession:
        """Raises `SessionUnknown` if it was dropped meanwhile."""
        if not self.has(kept):
            raise session_unknown(kept.id)
        return kept

    def of_caller(self, namespace: str) -> list[KeptSession]:
        """In the order in which they were opened."""
        return [kept for kept in self.sessions.values() if kept.head.namespace == namespace]

    def open(self, opened: OpenSession, size_bytes: int, now: float) -> KeptSession:
        """Opens a session, and drops others if there are too many or their records are too large together.

        Raises:
            SessionLimitReached: all sessions that are kept have calls in flight, or what it was opened with, of
                `size_bytes`, is too large.
        """
        deadline_s = opened.request.deadline_s
        head = SessionHead(
            namespace=opened.namespace,
            limits=opened.request.limits,
            opened_at=now,
            used_at=now,
            deadline_at=None if deadline_s is None else now + deadline_s,
            form=FORM,
        )
        kept = KeptSession(
            id=opened.id, head=head, use_stored_at=now, opened_bytes=size_bytes, read=ReadSession(opened)
        )
        self._add(kept, size_bytes)
        if not self.has(kept):
            raise SessionLimitReached.of("sample", _TOO_LARGE)
        return kept

    def end(self, kept: KeptSession, now: float) -> None:
        """Lets the session take no more calls, and aborts those in flight."""
        kept.head.is_ended = True
        kept.head.used_at = now

    def delete(self, kept: KeptSession) -> None:
        """Drops the session with its record, and aborts its calls in flight."""
        self._drop(kept.id)

    def begin_call(self, kept: KeptSession, call_id: str, now: float) -> None:
        """Does nothing for a call that is in flight. One that is refused changes nothing but `used_at`.

        Raises:
            SessionUnknown: the session was dropped.
            SessionClosed: it takes no more calls.
            SessionLimitReached: not this one now.
        """
        if call_id in self.still_kept(kept).in_flight:
            return
        kept.head.used_at = now
        if (status := kept.status(now)) != "open":
            ended = f"Session {kept.id!r} has ended and takes no more calls"
            message = ended if status == "ended" else f"The deadline of session {kept.id!r} is over"
            raise SessionClosed.of("session_id", message, kept.id)
        limits = kept.head.limits
        for name, value, bound in (
            ("max_calls", kept.head.calls, limits.max_calls),
            ("max_tokens", kept.tokens, limits.max_tokens),
            ("max_calls_in_flight", len(kept.in_flight), limits.max_calls_in_flight),
        ):
            if value >= bound:
                message = f"Session {kept.id!r} has reached limits.{name}: {value} of {bound}"
                raise SessionLimitReached.of(f"limits.{name}", message, kept.id)
        self._count_call(kept, call_id, now)

    def end_call(self, session_id: str, call_id: str, now: float) -> None:
        """Unknown ids are ignored."""
        if (kept := self.sessions.get(session_id)) is not None:
            kept.ended[call_id] = now
            self._take_out(kept, call_id, now)

    def heard(self, calls: Mapping[str, str], now: float) -> list[str]:
        """A replica makes these calls, each of a session. Returns those that it must abort.

        A call that is not known, but may go on, has begun at a store that was here before. Its session must be read.
        """
        return [call_id for call_id, session_id in calls.items() if not self._goes_on(call_id, session_id, now)]

    def _goes_on(self, call_id: str, session_id: str, now: float) -> bool:
        if (kept := self.sessions.get(session_id)) is None:
            return False
        is_open = kept.status(now) == "open"
        if call_id in kept.in_flight:
            kept.in_flight[call_id] = now
        elif is_open and kept.read and call_id not in kept.ended and not kept.read.record.has_call(call_id):
            kept.head.used_at = now
            self._count_call(kept, call_id, now)
        else:
            return False
        return is_open

    def note_read(self, kept: KeptSession, read: ReadSession) -> None:
        kept.read, kept.names = read, ()
        self.note_record(kept)

    def note_record(self, kept: KeptSession) -> None:
        """Its record has been read, or has grown: sessions are dropped if all records are too large together."""
        assert kept.read is not None
        record = kept.read.record
        # A call that began at an earlier store may be recorded before its replica names it here.
        kept.tokens = record.total_tokens
        kept.head.calls = max(kept.head.calls, record.call_count + len(kept.in_flight))
        self._set_size(kept, kept.opened_bytes + record.size_bytes)

    def forget(self, session_id: str) -> None:
        """Has a dropped session removed again: it was stored meanwhile."""
        self._dropped.add(session_id)

    def pass_time(self, now: float) -> None:
        """Drops what has expired, and ends the calls of replicas that are gone."""
        for kept in list(self.sessions.values()):
            for call_id in [name for name, heard_at in kept.in_flight.items() if now - heard_at > self._lease_s]:
                self._take_out(kept, call_id, now)
            kept.ended = {name: at for name, at in kept.ended.items() if now - at <= self._lease_s}
            if kept.expires_at is not None and now >= kept.expires_at:
                self._drop(kept.id)

    # What must be stored.

    def change(
        self, kept: KeptSession, zero_at: float, added: Mapping[EntryName, bytes] | None = None, recorded: int = 0
    ) -> StoredChange:
        """The session as it is, with these further entries.

        Args:
            recorded: how many of its calls that are in flight end with this change.
        """
        kept.use_stored_at = kept.head.used_at
        head = replace(kept.head, calls=kept.head.calls - len(kept.in_flight) + recorded)
        return StoredChange(kept.id, head_bytes(head, zero_at), added or {})

    def unstored(self, zero_at: float) -> Sequence[StoredChange]:
        """Changes for the caller to store: dropped sessions, and those whose last use is not stored for long."""
        removed = [StoredChange(session_id, None) for session_id in self._dropped]
        self._dropped.clear()
        late = [
            kept
            for kept in self.sessions.values()
            if kept.head.used_at - kept.use_stored_at > min(USE_STORED_S, kept.head.limits.idle_s / 2)
        ]
        return [*removed, *(self.change(kept, zero_at) for kept in late)]

    def _restore(self, stored: StoredRecord, head: SessionHead, now: float) -> None:
        head.used_at = max(min(head.used_at, now), now - max(head.limits.idle_s - _GRACE_S, 0.0))
        kept = KeptSession(
            id=stored.record_id,
            head=head,
            use_stored_at=head.used_at,
            opened_bytes=stored.sizes.get(OPENED, 0),
            names=tuple(stored.sizes),
        )
        self._add(kept, sum(stored.sizes.values()))

    def _add(self, kept: KeptSession, size_bytes: int) -> None:
        if len(self.sessions) >= self._max_sessions:
            counts = Counter(other.head.namespace for other in self.sessions.values())
            counts[kept.head.namespace] += 1
            if (idle := self._longest_idle(counts)) is None:
                message = f"All {self._max_sessions} sessions have calls in flight: end one, or wait for one"
                raise SessionLimitReached.of("limits.max_sessions", message, kept.id)
            self._drop(idle)
        self.sessions[kept.id] = kept
        self._set_size(kept, size_bytes)

    def _set_size(self, kept: KeptSession, size_bytes: int) -> None:
        """A session that was dropped is ignored."""
        if not self.has(kept):
            return
        self.size_bytes += size_bytes - kept.size_bytes
        kept.size_bytes = size_bytes
        while self.size_bytes > self._max_bytes:
            sizes = Counter[str]()
            for other in self.sessions.values():
                sizes[other.head.namespace] += other.size_bytes
            if (idle := self._longest_idle(sizes, has_record=True)) is None:
                return
            self._drop(idle)

    def _drop(self, session_id: str) -> None:
        """Removes the session, whatever it does."""
        self.size_bytes -= self.sessions.pop(session_id).size_bytes
        self._dropped.add(session_id)

    def _longest_idle(self, amounts: Mapping[str, int], has_record: bool = False) -> str | None:
        """The longest idle session of the namespace with the largest amount, of those that have one."""
        idle = (kept for kept in self.sessions.values() if not kept.in_flight and (kept.size_bytes or not has_record))
        longest = max(idle, key=lambda kept: (amounts[kept.head.namespace], -kept.head.used_at), default=None)
        return None if longest is None else longest.id

    def _count_call(self, kept: KeptSession, call_id: str, now: float) -> None:
        kept.head.calls += 1
        kept.in_flight[call_id] = now

    def _take_out(self, kept: KeptSession, call_id: str, now: float) -> None:
        if kept.in_flight.pop(call_id, None) is not None:
            kept.head.used_at = now
