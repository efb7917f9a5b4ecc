"""The sessions of one store: which are kept, what each may still do, and what of them must be stored.

`SessionsSettings` says where they are kept, and how large they may be together.

A state machine without clock and I/O. Times are in seconds since 1970. Guarantees:
- A session with a call in flight is dropped neither for its age nor for room.
- A call whose replica is silent for longer than its lease is no longer in flight. A table that starts again knows of no
  call: its session is in use for as long as the replica names the call. A replica's half is
  `deployments/generation/serving/session_call.py`.
- Room is made by the namespace that keeps the most: its session that is idle for the longest time goes first.
- The records together are larger than `max_bytes` only if all sessions have calls in flight.
- A session that was dropped is in `unstored` until its removal is stored.
- A session that is not in memory is read once. Until then it is known by its head: its limits and its age.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pydantic import Field

from deployments.sessions.codec import FORM, OPENED, ReadSession, SessionHead, head_of, written
from deployments.sessions.records import (
    OpenSession,
    SessionClosed,
    SessionLimitReached,
    SessionUnknown,
    session_unknown,
)
from deployments.storage.storage import EntryName, StorageSettings, StoredChange, StoredRecord
from rollout_client.contract.sessions import SessionStatus

GIB = 2**30
_HARMONY_MODELS = frozenset({"gpt_oss"})
"""Types of models whose prompts vLLM writes in the harmony format, past the chat template and a session's own ids."""


class _ModelNotRecordable(Exception):
    """Sessions are configured beside a model whose calls they cannot record."""


def refuse_unrecordable(model_type: str | None) -> None:
    """Raises `_ModelNotRecordable`. `model_type` is that of the model's config."""
    if model_type in _HARMONY_MODELS:
        raise _ModelNotRecordable(
            f"sessions record no calls of a model of type {model_type}: vLLM writes its prompts in the harmony format, "
            "not with the model's chat template; leave `sessions` and agents out, and play its tasks with environments"
        )


class SessionsSettings(StorageSettings):
    max_bytes: int = Field(default=4 * GIB, ge=1)
    """Bound of all records together, in memory; the database takes about half more. Beyond it the caller whose records
    are the largest loses the session that is idle for the longest time."""
    lease_s: float = Field(default=10, gt=0)
    """A generator replica that was not heard of for so many seconds has lost its calls: they end without a record."""
    base_url: str | None = Field(default=None, pattern=r"^https?://[^/]+(/.*)?$")
    """The service's address as agents reach it, such as `https://rollouts.example.com`, for the `base_url` of sessions.
    Default: what the request that opens a session was sent to."""


SESSION_BYTES = 2000
"""Approximate size of a session without its record and what it was opened with."""
_TOO_LARGE = "it is larger than sessions.max_bytes leaves room for; shorten it, or end other sessions"


@dataclass(slots=True, eq=False, kw_only=True)
class KeptSession:
    """A session, in memory or not."""

    id: str
    head: SessionHead
    in_flight: dict[str, float] = field(default_factory=dict)
    """When the replica of each call was last heard of, by the call's id."""
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
    def __init__(self, settings: SessionsSettings, stored: Iterable[StoredRecord], now: float) -> None:
        self._lease_s = settings.lease_s
        self._max_bytes = settings.max_bytes
        self.sessions: dict[str, KeptSession] = {}
        """By id, in the order in which they were opened."""
        self._idle: defaultdict[str, dict[str, KeptSession]] = defaultdict(dict)
        """By namespace, its sessions without calls in flight, the longest idle first."""
        self._bytes_of: Counter[str] = Counter()
        """By namespace, bytes of all records, and of what their sessions were opened with."""
        heads = [(record, head_of(record.record)) for record in stored]
        self._dropped = {record.record_id for record, head in heads if head.form != FORM}
        for record, head in sorted(heads, key=lambda pair: pair[1].used_at):
            if head.form == FORM:
                self._restore(record, head)
        self.sessions = dict(sorted(self.sessions.items(), key=lambda item: item[1].head.opened_at))
        for kept in self.sessions.values():
            # Nobody could use it while there was no store.
            kept.head.used_at = now

    @property
    def size_bytes(self) -> int:
        return self._bytes_of.total()

    def get(self, session_id: str, namespace: str | None = None) -> KeptSession:
        """Raises `SessionUnknown`, also for a session of another caller than `namespace`, if that is given."""
        kept = self.sessions.get(session_id)
        if kept is None or namespace not in (None, kept.head.namespace):
            raise session_unknown(session_id)
        return kept

    def has(self, kept: KeptSession) -> bool:
        return self.sessions.get(kept.id) is kept

    def still_kept(self, kept: KeptSession) -> KeptSession:
        """Raises `SessionUnknown` as `gone` makes it, if it was dropped meanwhile."""
        if not self.has(kept):
            raise self.gone(kept)
        return kept

    def gone(self, kept: KeptSession) -> SessionUnknown:
        """The failure of a session that was dropped meanwhile: what was stored of it since is removed again."""
        self._dropped.add(kept.id)
        return session_unknown(kept.id)

    def of_caller(self, namespace: str) -> list[KeptSession]:
        """In the order in which they were opened."""
        return [kept for kept in self.sessions.values() if kept.head.namespace == namespace]

    def open(self, opened: OpenSession, size_bytes: int, now: float) -> KeptSession:
        """Opens a session, and drops others if their records are too large together.

        Raises:
            SessionLimitReached: there is no room for what it was opened with, of `size_bytes`.
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
        kept = KeptSession(id=opened.id, head=head, opened_bytes=SESSION_BYTES + size_bytes, read=ReadSession(opened))
        self.sessions[kept.id] = kept
        self.use(kept, now)
        self._set_size(kept, kept.opened_bytes)
        if not self.has(kept):
            raise SessionLimitReached.of("sample", _TOO_LARGE)
        return kept

    def use(self, kept: KeptSession, now: float) -> None:
        """Notes that something is asked of the session now, or that a call of it has begun or ended."""
        kept.head.used_at = now
        idle = self._idle[kept.head.namespace]
        idle.pop(kept.id, None)
        if self.has(kept) and not kept.in_flight:
            idle[kept.id] = kept

    def end(self, kept: KeptSession, now: float) -> None:
        """Lets the session take no more calls, and aborts those in flight."""
        kept.head.is_ended = True
        self.use(kept, now)

    def drop(self, session_id: str) -> None:
        """Removes the session with its record, and aborts its calls in flight."""
        kept = self.sessions.pop(session_id)
        self._idle[kept.head.namespace].pop(session_id, None)
        self._bytes_of[kept.head.namespace] -= kept.size_bytes
        self._dropped.add(session_id)

    def begin_call(self, kept: KeptSession, call_id: str, now: float) -> None:
        """Does nothing for a call that is in flight. The session must be read.

        Raises:
            SessionUnknown: the session was dropped.
            SessionClosed: it takes no more calls.
            SessionLimitReached: not this one now.
        """
        if call_id in self.still_kept(kept).in_flight:
            return
        self.use(kept, now)
        if (status := kept.status(now)) != "open":
            ended = f"Session {kept.id!r} has ended and takes no more calls"
            message = ended if status == "ended" else f"The deadline of session {kept.id!r} is over"
            raise SessionClosed.of("session_id", message, kept.id)
        assert kept.read is not None
        limits, record, in_flight = kept.head.limits, kept.read.record, len(kept.in_flight)
        for name, value, bound in (
            ("max_calls", len(record.calls) + in_flight, limits.max_calls),
            ("max_tokens", record.total_tokens, limits.max_tokens),
            ("max_calls_in_flight", in_flight, limits.max_calls_in_flight),
        ):
            if value >= bound:
                message = f"Session {kept.id!r} has reached limits.{name}: {value} of {bound}"
                raise SessionLimitReached.of(f"limits.{name}", message, kept.id)
        kept.in_flight[call_id] = now
        self.use(kept, now)

    def end_call(self, session_id: str, call_id: str, now: float) -> None:
        """Unknown ids are ignored."""
        kept = self.sessions.get(session_id)
        if kept is not None and kept.in_flight.pop(call_id, None) is not None:
            self.use(kept, now)

    def heard(self, calls: Mapping[str, str], now: float) -> list[str]:
        """A replica makes these calls, each of a session. Returns those that it must abort."""
        to_abort = []
        for call_id, session_id in calls.items():
            kept = self.sessions.get(session_id)
            if kept is None or kept.status(now) != "open":
                to_abort.append(call_id)
                continue
            self.use(kept, now)
            if call_id in kept.in_flight:
                kept.in_flight[call_id] = now
        return to_abort

    def note_read(self, kept: KeptSession, read: ReadSession) -> None:
        kept.read, kept.names = read, ()
        self.note_record(kept)

    def note_record(self, kept: KeptSession) -> None:
        """Its record has been read, or has grown: sessions are dropped if all records are too large together."""
        assert kept.read is not None
        self._set_size(kept, kept.opened_bytes + kept.read.record.size_bytes)

    def pass_time(self, now: float) -> None:
        """Drops what has expired, and ends the calls of replicas that are gone."""
        for kept in list(self.sessions.values()):
            for call_id in [name for name, heard_at in kept.in_flight.items() if now - heard_at > self._lease_s]:
                self.end_call(kept.id, call_id, now)
            if kept.expires_at is not None and now >= kept.expires_at:
                self.drop(kept.id)

    def change(self, kept: KeptSession, added: Mapping[EntryName, bytes] | None = None) -> StoredChange:
        """The change to store: the session as it is, with these further entries."""
        return StoredChange(kept.id, written(kept.head), added or {})

    def unstored(self) -> Sequence[StoredChange]:
        """The removals of dropped sessions, for the caller to store."""
        removed = [StoredChange(session_id, None) for session_id in self._dropped]
        self._dropped.clear()
        return removed

    def _restore(self, stored: StoredRecord, head: SessionHead) -> None:
        opened_bytes = SESSION_BYTES + stored.sizes.get(OPENED, 0)
        kept = KeptSession(id=stored.record_id, head=head, opened_bytes=opened_bytes, names=tuple(stored.sizes))
        self.sessions[kept.id] = kept
        self.use(kept, head.used_at)
        self._set_size(kept, SESSION_BYTES + sum(stored.sizes.values()))

    def _set_size(self, kept: KeptSession, size_bytes: int) -> None:
        """Makes room for the session's size. A session that was dropped is ignored."""
        if not self.has(kept):
            return
        self._bytes_of[kept.head.namespace] += size_bytes - kept.size_bytes
        kept.size_bytes = size_bytes
        while self.size_bytes > self._max_bytes and (idle := self._longest_idle()) is not None:
            self.drop(idle)

    def _longest_idle(self) -> str | None:
        """The longest idle session of the namespace that keeps the most bytes, of those that have one."""
        callers = [namespace for namespace, idle in self._idle.items() if idle]
        largest = max(callers, key=self._bytes_of.__getitem__, default=None)
        return None if largest is None else next(iter(self._idle[largest]))
