"""Stores the calls of all sessions: those that come while others are being stored are stored together after them."""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextvars import Context
from dataclasses import dataclass, field
from functools import partial

from deployments.sessions.failures import session_unknown
from deployments.sessions.journal import call_entry, call_name
from deployments.sessions.records import EngineCall
from deployments.sessions.session_book import KeptSession, Now, SessionBook
from deployments.sessions.session_record import SessionRecord
from deployments.storage.records import StoredChange
from deployments.storage.stored_state import Planned, StoredState


@dataclass(slots=True, eq=False)
class PendingCall:
    kept: KeptSession
    record: SessionRecord
    call: EngineCall
    entry: bytes
    stored: "asyncio.Future[int | None]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class CallWriter:
    """Guarantee: the calls of a session are stored and added in one order."""

    def __init__(self, state: StoredState[SessionBook], now: Callable[[], Now]) -> None:
        self._state = state
        self._now = now
        self._pending: list[PendingCall] = []
        self._writing: asyncio.Task[None] | None = None

    async def add(self, kept: KeptSession, record: SessionRecord, call: EngineCall) -> int | None:
        """Returns when the record has the call, and it is stored.

        Returns:
            The number of calls that the record had before it; `None` if it adds nothing to the record.

        Raises:
            StoreLost: it could not be stored.
            SessionUnknown: the session was dropped meanwhile.
        """
        pending = PendingCall(kept, record, call, call_entry(call))
        self._pending.append(pending)
        if self._writing is None:
            # An empty context: Serve ends the calls of a request that its caller has left, and others wait too.
            self._writing = asyncio.create_task(self._write_all(), context=Context())
        # Others wait for the same write.
        return await asyncio.shield(pending.stored)

    async def _write_all(self) -> None:
        try:
            while self._pending:
                together, self._pending = self._pending, []
                await self._write(together)
        finally:
            self._writing = None

    async def _write(self, together: Sequence[PendingCall]) -> None:
        failure: Exception | None = None
        places: Mapping[PendingCall, int | None] = {}
        try:
            places = await self._state.change(partial(self._plan, together))
        except Exception as error:  # noqa: BLE001 - those who wait raise it
            failure = error
        for pending in together:
            if pending.stored.done():
                continue
            if failure is not None:
                pending.stored.set_exception(failure)
            elif pending in places:
                pending.stored.set_result(places[pending])
            else:
                pending.stored.set_exception(session_unknown(pending.kept.id))

    def _plan(self, together: Sequence[PendingCall], book: SessionBook) -> Planned[Mapping[PendingCall, int | None]]:
        """What is answered is the place of each call in its record, of those whose session is still kept."""
        new = list(new_calls(together, book))
        added: Counter[KeptSession] = Counter()
        places: dict[PendingCall, int] = {}
        changes: list[StoredChange] = []
        for pending in new:
            place = places[pending] = pending.record.call_count + added[pending.kept]
            added[pending.kept] += 1
            changes.append(
                book.change(pending.kept, self._now(), {call_name(place): pending.entry}, added[pending.kept])
            )

        def commit() -> Mapping[PendingCall, int | None]:
            for pending in together:
                book.end_call(pending.call.id, self._now())
            for pending in new:
                pending.record.add(pending.call)
            for kept in added:
                if book.find(kept.id) is kept:
                    book.note_record(kept)
                else:
                    book.forget(kept.id)
            return {one: places.get(one) for one in together if book.find(one.kept.id) is one.kept}

        return changes, commit


def new_calls(together: Sequence[PendingCall], book: SessionBook) -> Sequence[PendingCall]:
    """Those that change a record: of sessions that are kept, and each once."""
    by_id = {(pending.kept.id, pending.call.id): pending for pending in together}
    return [
        pending
        for pending in by_id.values()
        if book.find(pending.kept.id) is pending.kept and pending.record.would_add(pending.call)
    ]
