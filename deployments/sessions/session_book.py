"""Which sessions a store keeps, what of them is in memory, and what must be stored.

`SessionBook` is a state machine: no I/O, no clock. Guarantees: a session that was dropped is in `unstored` until its
removal is; a session that is not in memory is read once, and is meanwhile known by its head: its limits, its age, what
it has used.

`plan_calls` records the calls of any sessions together, in the order in which they came.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from deployments.sessions.failures import session_unknown
from deployments.sessions.journal import OPENED, ReadSession, SessionHead, call_entry, call_name, head_bytes, head_of
from deployments.sessions.records import EngineCall, OpenSession
from deployments.sessions.session_record import SessionRecord
from deployments.sessions.session_table import CallsInFlight, KeptSession, SessionTable
from deployments.sessions.settings import SessionsSettings
from deployments.storage.storage import EntryName, StoredChange, StoredRecord
from deployments.storage.stored_state import Planned

USE_STORED_S = 30.0
"""How often it is stored that a session was used, where nothing else of it is."""
GRACE_S = 60.0
"""No session expires sooner after the start of a store: nobody could use it while there was none."""


class Now(NamedTuple):
    """In seconds."""

    monotonic: float
    time_s: float
    """Since 1970."""


class SessionBook:
    def __init__(self, settings: SessionsSettings, kept: Iterable[StoredRecord], now: Now) -> None:
        self._table = SessionTable(settings.max_sessions, settings.max_bytes)
        self.calls = CallsInFlight(settings.lease_s)
        self._dropped: set[str] = set()
        heads = [(stored, head_of(stored.record)) for stored in kept]
        for stored, head in sorted(heads, key=lambda pair: pair[1].used_at):
            self._restore(stored, head, now)
        self._table.sessions = dict(sorted(self._table.sessions.items(), key=lambda item: item[1].opened_at))

    def find(self, session_id: str) -> KeptSession | None:
        return self._table.sessions.get(session_id)

    def get(self, session_id: str, namespace: str | None = None) -> KeptSession:
        """Raises `SessionUnknown`, also for a session of another caller than `namespace`, if that is given."""
        kept = self.find(session_id)
        if kept is None or namespace not in (None, kept.namespace):
            raise session_unknown(session_id)
        return kept

    def has(self, kept: KeptSession) -> bool:
        return self._table.has(kept)

    def still_kept(self, kept: KeptSession) -> KeptSession:
        """Raises `SessionUnknown` if it was dropped meanwhile."""
        if not self.has(kept):
            raise session_unknown(kept.id)
        return kept

    def of_caller(self, namespace: str) -> list[KeptSession]:
        """In the order in which they were opened."""
        return [kept for kept in self._table.sessions.values() if kept.namespace == namespace]

    def use(self, kept: KeptSession, now: Now) -> None:
        """Notes that something is asked of the session."""
        self._table.use(kept, now.monotonic)

    def open(self, opened: OpenSession, size_bytes: int, now: Now) -> KeptSession | None:
        """`None` if there is no room for what it was opened with, of `size_bytes`. Raises `SessionLimitReached`."""
        deadline_s = opened.request.deadline_s
        kept = KeptSession(
            id=opened.id,
            namespace=opened.namespace,
            limits=opened.request.limits,
            opened_at=now.time_s,
            used_at=now.monotonic,
            use_stored_at=now.monotonic,
            deadline_at=None if deadline_s is None else now.monotonic + deadline_s,
            opened_bytes=size_bytes,
            read=ReadSession(opened),
        )
        self._dropped.update(self._table.add(kept, size_bytes))
        return kept if self.has(kept) else None

    def end(self, kept: KeptSession, now: Now) -> None:
        """Lets the session take no more calls, and aborts those in flight."""
        kept.is_ended = True
        self.use(kept, now)
        self.calls.abort({kept.id})

    def delete(self, kept: KeptSession) -> None:
        """Drops the session with its record, and aborts its calls in flight."""
        self.calls.abort({kept.id})
        self._dropped.add(self._table.drop(kept.id))

    def begin_call(self, kept: KeptSession, call_id: str, now: Now) -> None:
        """Does nothing for a call that is in flight. Raises as `SessionTable.begin_call`."""
        if call_id not in self.calls:
            self._table.begin_call(kept, now.monotonic)
            self.calls.begin(call_id, kept.id, now.monotonic)

    def end_call(self, call_id: str, now: Now) -> None:
        """Unknown ids are ignored."""
        if (session_id := self.calls.end(call_id, now.monotonic)) is not None:
            self._table.end_call(session_id, now.monotonic)

    def heard(self, calls: Mapping[str, str], now: Now) -> list[str]:
        """A replica makes these calls, each of a session. Returns those that it must abort.

        A call that is not known, but may go on, has begun at a store that was here before. Its session must be read.
        """
        for call_id, session_id in calls.items():
            kept = self.find(session_id)
            if call_id not in self.calls and kept is not None and not self._has_ended(call_id, kept):
                self._table.resume_call(kept, now.monotonic)
                self.calls.begin(call_id, session_id, now.monotonic)
        return self.calls.heard(calls, now.monotonic)

    def _has_ended(self, call_id: str, kept: KeptSession) -> bool:
        if kept.read is None or kept.is_ended:
            return True
        return self.calls.has_ended(call_id) or kept.read.record.has_call(call_id)

    def note_record(self, kept: KeptSession) -> None:
        """Its record has been read, or has grown."""
        assert kept.read is not None
        record = kept.read.record
        size_bytes = kept.opened_bytes + record.size_bytes
        self._dropped.update(self._table.note_record(kept, record.total_tokens, size_bytes, record.call_count))

    def note_read(self, kept: KeptSession, read: ReadSession) -> None:
        kept.read, kept.names = read, ()
        self.note_record(kept)

    def forget(self, session_id: str) -> None:
        """Has a dropped session removed again: it was stored meanwhile."""
        self._dropped.add(session_id)

    def pass_time(self, now: Now) -> None:
        """Drops what has expired, aborts what is beyond its deadline, and ends the calls of replicas that are gone."""
        for _, session_id in self.calls.lost(now.monotonic):
            self._table.end_call(session_id, now.monotonic)
        self.calls.abort(self._table.beyond_deadline(now.monotonic))
        self._dropped.update(self._table.drop_expired(now.monotonic))

    # What must be stored.

    def change(
        self, kept: KeptSession, now: Now, added: Mapping[EntryName, bytes] | None = None, recorded: int = 0
    ) -> StoredChange:
        """The session as it is, with these further entries.

        Args:
            recorded: how many of its calls that are in flight end with this change.
        """
        kept.use_stored_at = kept.used_at
        head = SessionHead(
            namespace=kept.namespace,
            limits=kept.limits,
            opened_at=kept.opened_at,
            used_at=now.time_s - (now.monotonic - kept.used_at),
            deadline_at=None if kept.deadline_at is None else now.time_s + kept.deadline_at - now.monotonic,
            is_ended=kept.is_ended,
            calls=kept.calls - kept.in_flight + recorded,
        )
        return StoredChange(kept.id, head_bytes(head), added or {})

    def unstored(self, now: Now) -> Sequence[StoredChange]:
        """Changes for the caller to store: dropped sessions, and those whose last use is not stored for long."""
        removed = [StoredChange(session_id, None) for session_id in self._dropped]
        self._dropped.clear()
        late = [
            kept
            for kept in self._table.sessions.values()
            if kept.used_at - kept.use_stored_at > min(USE_STORED_S, kept.limits.idle_s / 2)
        ]
        return [*removed, *(self.change(kept, now) for kept in late)]

    def _restore(self, stored: StoredRecord, head: SessionHead, now: Now) -> None:
        age_s = min(max(now.time_s - head.used_at, 0.0), max(head.limits.idle_s - GRACE_S, 0.0))
        used_at = now.monotonic - age_s
        kept = KeptSession(
            id=stored.record_id,
            namespace=head.namespace,
            limits=head.limits,
            opened_at=head.opened_at,
            used_at=used_at,
            use_stored_at=used_at,
            deadline_at=None if head.deadline_at is None else now.monotonic + head.deadline_at - now.time_s,
            is_ended=head.is_ended,
            calls=head.calls,
            opened_bytes=stored.sizes.get(OPENED, 0),
            names=tuple(stored.sizes),
        )
        self._dropped.update(self._table.add(kept, sum(stored.sizes.values())))


@dataclass(slots=True, eq=False)
class CallToRecord:
    kept: KeptSession
    record: SessionRecord
    call: EngineCall
    entry: bytes

    @classmethod
    def of(cls, kept: KeptSession, record: SessionRecord, call: EngineCall) -> "CallToRecord":
        return cls(kept, record, call, call_entry(call))


def plan_calls(
    calls: Sequence[CallToRecord], book: SessionBook, now: Callable[[], Now]
) -> Planned[list[int | Exception | None]]:
    """Records calls of any sessions, each once.

    The result of a call is the number of calls that the record had before it, `None` if it adds nothing to the record,
    or `SessionUnknown` if the session was dropped meanwhile.
    """
    by_id = {(each.kept.id, each.call.id): each for each in calls}
    new = [each for each in by_id.values() if book.has(each.kept) and each.record.would_add(each.call)]
    added: Counter[KeptSession] = Counter()
    places: dict[CallToRecord, int] = {}
    changes: list[StoredChange] = []
    for each in new:
        place = places[each] = each.record.call_count + added[each.kept]
        added[each.kept] += 1
        changes.append(book.change(each.kept, now(), {call_name(place): each.entry}, added[each.kept]))

    def commit() -> list[int | Exception | None]:
        for each in calls:
            book.end_call(each.call.id, now())
        for each in new:
            each.record.add(each.call)
        for kept in added:
            if book.has(kept):
                book.note_record(kept)
            else:
                book.forget(kept.id)
        return [places.get(each) if book.has(each.kept) else session_unknown(each.kept.id) for each in calls]

    return changes, commit
