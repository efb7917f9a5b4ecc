"""Copies of the records of sessions beside the engine, so that a call is planned without waiting for the store.

All calls of a session go to the replica that has its prefix, which has made the earlier ones and so knows the record.
The store's record stays the one that counts: it says of each call whether the copy has all that it has.

Guarantee: a copy has the calls of the record, in its order, up to one of them. One that misses a call in between is
dropped, and made no more: a session that another replica has begun has none here.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from deployments.failures import RolloutFailure
from deployments.sessions.records import ChatContext, Conversation, EngineCall, Plan
from deployments.sessions.session_record import SessionRecord

MOST_BYTES = 256 * 2**20
"""Size of all copies of one replica."""
FORGET_AFTER_S = 600.0
"""A session that makes no call for so long is forgotten, as the scheduler forgets where its prefix is."""


class RecordOutdated(RolloutFailure):
    """A call was planned with a copy of the record that misses one: it is planned again, by the store."""

    retryable = True


@dataclass(slots=True, eq=False)
class RecordCopy:
    record: SessionRecord = field(default_factory=SessionRecord)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """A thread may plan with the record: nothing is added meanwhile."""
    used_at: float = 0.0
    size_bytes: int = 0


class RecordCopies:
    """Copies of one replica, by session."""

    def __init__(self, most_bytes: int = MOST_BYTES, now_s: Callable[[], float] = time.monotonic) -> None:
        """`now_s` is a monotonic clock, in seconds."""
        self._most_bytes = most_bytes
        self._now_s = now_s
        self._copies: OrderedDict[str, RecordCopy] = OrderedDict()
        """The one that was used longest ago first."""
        self._size_bytes = 0

    async def plan(
        self,
        session_id: str,
        conversation: Conversation,
        context: ChatContext,
        policy: str | None,
        in_thread: bool,
    ) -> tuple[Plan, int] | None:
        """The plan of a call, as `SessionRecord.plan`, with how many calls the copy has; `None` without a copy."""
        if (copy := self._used(session_id)) is None:
            return None
        async with copy.lock:
            plan = copy.record.plan
            found = (
                await asyncio.to_thread(plan, conversation, context, policy)
                if in_thread
                else plan(conversation, context, policy)
            )
            return found, copy.record.call_count

    async def add(self, session_id: str, call: EngineCall, place: int | None) -> None:
        """Notes a call that the store has recorded.

        Args:
            place: how many calls the store's record had before; `None` if it did not add this one.
        """
        copy = self._used(session_id)
        if copy is None and place == 0:
            copy = self._copies[session_id] = RecordCopy(used_at=self._now_s())
        if copy is None:
            return
        async with copy.lock:
            if place is None and not copy.record.would_add(call):
                return
            if place != copy.record.call_count:
                # Another replica has made a call of the session.
                self.drop(session_id)
                return
            copy.record.add(call)
            if self._copies.get(session_id) is copy:
                self._size_bytes += copy.record.size_bytes - copy.size_bytes
                copy.size_bytes = copy.record.size_bytes
        self._make_room()

    def has_call(self, session_id: str, call_id: str) -> bool:
        copy = self._copies.get(session_id)
        return copy is not None and copy.record.has_call(call_id)

    def drop(self, session_id: str) -> None:
        """Unknown ids are ignored."""
        if (copy := self._copies.pop(session_id, None)) is not None:
            self._size_bytes -= copy.size_bytes

    def _used(self, session_id: str) -> RecordCopy | None:
        if (copy := self._copies.get(session_id)) is not None:
            copy.used_at = self._now_s()
            self._copies.move_to_end(session_id)
        return copy

    def _make_room(self) -> None:
        now = self._now_s()
        while self._copies:
            session_id, oldest = next(iter(self._copies.items()))
            if self._size_bytes <= self._most_bytes and now - oldest.used_at < FORGET_AFTER_S:
                return
            self.drop(session_id)
