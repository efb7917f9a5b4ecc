"""The session store, one for the service: the Serve deployment, and its client over a Serve handle.

It keeps the record of each session, which so outlives the agent, the ingress replica and the generator replica that
worked for it, and the store itself. What is kept, for how long, and what may begin is in `SessionTable`, what a
conversation continues in `SessionRecord`, what a failing database does in `StoredState`.

Guarantee: what `open`, `add`, `reward` and `end` return for is stored. A store that starts again has it.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any, Literal, TypeVar, cast

from ray.serve.handle import DeploymentHandle

from deployments.failures import SessionStoreLost, StoreLost
from deployments.rpc.batching import (
    BYTES_PER_LOGPROB,
    BYTES_PER_RECORD,
    BYTES_PER_TOKEN_ID,
    CallBatcher,
    at_once,
    bytes_of_columns,
    bytes_of_json,
    bytes_of_text,
    group_commit,
    results_of,
)
from deployments.rpc.handle_calls import StoreClient
from deployments.sessions.codec import OPENED, ReadSession, call_entry, session_of, written
from deployments.sessions.message_comparison import drift_report
from deployments.sessions.records import ChatContext, Conversation, EngineCall, OpenSession, Plan
from deployments.sessions.samples import policy_versions, samples_of
from deployments.sessions.session_record import SessionRecord
from deployments.sessions.session_table import KeptSession, SessionsSettings, SessionTable
from deployments.storage.storage import EntryName, Storage, StoredChange, StoredRecord, StoreReplaced, attempts
from deployments.storage.stored_state import Planned, StoreReplica
from rollout_client.contract.sessions import DriftReport, SessionInfo, SessionReward, SessionSamples

Result = TypeVar("Result")


@dataclass(slots=True, eq=False)
class _CallToRecord:
    kept: KeptSession
    record: SessionRecord
    call: EngineCall
    entry: bytes


class SessionStore(StoreReplica[SessionTable]):
    """The session store. Every method that names a session raises `SessionUnknown` if it is not kept, or not of
    `namespace`, and `StorageFailed` if it must be read or stored and the database fails.

    Args:
        now_s: seconds of a monotonic clock.
        time_s: seconds since 1970, read once: a clock that is set later moves no session's time.
    """

    def __init__(
        self,
        settings: SessionsSettings,
        storage: Storage | None = None,
        now_s: Callable[[], float] = time.monotonic,
        time_s: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(settings, storage, "session")
        self._settings = settings
        self._zero_at = time_s() - now_s()
        self._now_s = now_s
        self._calls: CallBatcher[_CallToRecord, None] = group_commit(self._record)
        self._reading: dict[str, asyncio.Task[None]] = {}
        """By the session that is being read."""

    # Called by the ingress.

    async def open(self, opened: OpenSession) -> SessionInfo:
        """Doing it again changes nothing.

        Raises:
            SessionLimitReached: there is no room for it.
        """
        entry = written(opened)
        table = await self._state.started()
        if (before := table.sessions.get(opened.id)) is not None:
            # An earlier store may have opened it, and died before it answered.
            await self._read(table, before)

        def plan(table: SessionTable) -> Planned[SessionInfo]:
            if (kept := table.sessions.get(opened.id)) is not None:
                return [], lambda: self._info(kept)
            new = table.open(opened, len(entry), self._now())
            return [table.change(new, {OPENED: entry})], lambda: self._info(table.still_kept(new))

        return await self._state.change(plan)

    async def opened(self, session_id: str) -> OpenSession:
        """The request that opened the session, with the hash of its key."""
        table = await self._state.started()
        return (await self._read(table, table.get(session_id))).opened

    async def info(self, session_id: str, namespace: str) -> SessionInfo:
        table, kept, _ = await self._used(session_id, namespace)
        return self._info(table.still_kept(kept))

    async def infos(self, namespace: str) -> list[SessionInfo]:
        table = await self._state.started()
        for kept in table.of_caller(namespace):
            await self._read(table, kept)
        return [self._info(kept) for kept in table.of_caller(namespace)]

    async def samples(self, session_id: str, namespace: str) -> SessionSamples:
        _, kept, read = await self._used(session_id, namespace)
        request = read.opened.request
        samples = samples_of(session_id, read.record, request.sample, request.generation_index)
        return SessionSamples(
            session_id=session_id, status=kept.status(self._now()), samples=samples, policy=policy_versions(read.record)
        )

    async def drift(self, session_id: str, namespace: str) -> DriftReport:
        _, _, read = await self._used(session_id, namespace)
        return drift_report(session_id, read.record.calls.values())

    async def reward(self, session_id: str, namespace: str, reward: SessionReward) -> SessionInfo:
        """Raises `GenerationUnknown`."""
        _, kept, read = await self._used(session_id, namespace)
        number = read.record.reward_number(reward.generation_id)
        entry = written({"parts": reward.parts, "generation_id": reward.generation_id})

        def commit() -> SessionInfo:
            read.record.reward(reward.parts, reward.generation_id)
            return self._info(kept)

        return await self._stored(kept, {EntryName("reward", number): entry}, commit)

    async def end(self, session_id: str, namespace: str) -> SessionInfo:
        """Lets the session take no more calls, and aborts those in flight. Its record stays until it expires."""
        table = await self._state.started()
        kept = table.get(session_id, namespace)
        # At once, whatever the database does: nobody wants these calls any longer.
        table.end(kept, self._now())
        await self._read(table, kept)
        return await self._stored(kept, {}, lambda: self._info(kept))

    async def delete(self, session_id: str, namespace: str) -> None:
        """Drops the session with its record, and aborts its calls in flight."""
        table = await self._state.started()
        # At once, whatever the database does, as in `end`.
        table.drop(table.get(session_id, namespace).id)
        await self._state.change(self._unstored)

    # Called by a generator replica.

    async def plan(self, session_id: str, call_id: str, conversation: Conversation, context: ChatContext) -> Plan:
        """Begins a call and finds what its conversation continues. Doing it again begins no other call.

        Raises:
            SessionClosed: the session takes no more calls.
            SessionLimitReached: not this one now.
            PromptRejected: the messages or tools are nested too deeply.
        """
        table = await self._state.started()
        kept = table.get(session_id)
        read = await self._read(table, kept)
        plan = read.record.plan(conversation, context, read.opened.request.policy.name)
        table.begin_call(kept, call_id, self._now())
        return plan

    async def add(self, session_id: str, call: EngineCall) -> None:
        """Records a call, and ends it. Doing it again changes nothing."""
        table = await self._state.started()
        kept = table.get(session_id)
        read = await self._read(table, kept)
        await asyncio.shield(self._calls.add(_CallToRecord(kept, read.record, call, call_entry(call))))

    async def _record(self, calls: Sequence["_CallToRecord"]) -> list[Exception | None]:
        return await self._state.change(partial(self._planned_calls, calls))

    def _planned_calls(self, calls: Sequence["_CallToRecord"], table: SessionTable) -> Planned[list[Exception | None]]:
        """Records calls of any sessions, each once; the result of one whose session was dropped is `SessionUnknown`."""
        by_id = {(each.kept.id, each.call.id): each for each in calls}
        new = [each for each in by_id.values() if table.has(each.kept) and each.record.would_add(each.call)]
        added: Counter[KeptSession] = Counter()
        changes: list[StoredChange] = []
        for each in new:
            place = len(each.record.calls) + added[each.kept]
            added[each.kept] += 1
            changes.append(table.change(each.kept, {EntryName("call", place): each.entry}))

        def commit() -> list[Exception | None]:
            for each in calls:
                table.end_call(each.kept.id, each.call.id, self._now())
            for each in new:
                each.record.add(each.call)
            for kept in added:
                table.note_record(kept)
            return [None if table.has(each.kept) else table.gone(each.kept) for each in calls]

        return changes, commit

    async def batched(self, method: Literal["plan", "add"], calls: Sequence[tuple[Any, ...]]) -> list[Any]:
        """The results of concurrent calls of a method, in their order; an exception in the place of its result."""
        return await results_of([getattr(self, method)(*call) for call in calls])

    async def end_call(self, session_id: str, call_id: str) -> None:
        """Ends a call that generated nothing. Unknown ids are ignored."""
        (await self._state.started()).end_call(session_id, call_id, self._now())

    async def heard(self, calls: Mapping[str, str]) -> list[str]:
        """A replica makes these calls, each of a session. Returns those that it must abort."""
        return (await self._state.started()).heard(calls, self._now())

    async def pass_time(self) -> None:
        (await self._state.started()).pass_time(self._now())
        await self._state.change(self._unstored)

    def _load(self, kept: Sequence[StoredRecord]) -> SessionTable:
        return SessionTable(self._settings, kept, self._now())

    def _unstored(self, table: SessionTable) -> Planned[None]:
        return table.unstored(), lambda: None

    async def _read(self, table: SessionTable, kept: KeptSession) -> ReadSession:
        """The contents of the session, read at the first call that needs them after a start."""
        while kept.read is None:
            if (reading := self._reading.get(kept.id)) is None:
                reading = self._reading[kept.id] = asyncio.create_task(self._read_now(table, kept))
                reading.add_done_callback(lambda _: self._reading.pop(kept.id))
            await asyncio.shield(reading)
        return kept.read

    async def _read_now(self, table: SessionTable, kept: KeptSession) -> None:
        entries = await self._state.read(kept.id, list(kept.names))
        table.note_read(kept, await asyncio.to_thread(session_of, entries))

    async def _stored(
        self, kept: KeptSession, added: Mapping[EntryName, bytes], commit: Callable[[], Result]
    ) -> Result:
        """Stores the session with further entries, then commits. Raises `SessionUnknown` if it was dropped."""

        def plan(table: SessionTable) -> Planned[Result]:
            changes = [table.change(table.still_kept(kept), added)]

            def commit_if_kept() -> Result:
                table.still_kept(kept)
                return commit()

            return changes, commit_if_kept

        return await self._state.change(plan)

    async def _used(self, session_id: str, namespace: str) -> tuple[SessionTable, KeptSession, ReadSession]:
        """The session, which something is asked of now."""
        table = await self._state.started()
        kept = table.get(session_id, namespace)
        table.use(kept, self._now())
        return table, kept, await self._read(table, kept)

    def _now(self) -> float:
        """Seconds since 1970."""
        return self._zero_at + self._now_s()

    def _info(self, kept: KeptSession) -> SessionInfo:
        read, expires_at = kept.read, kept.expires_at
        assert read is not None
        return SessionInfo(
            id=kept.id,
            base_url=read.opened.base_url,
            status=kept.status(self._now()),
            calls=len(read.record.calls) + len(kept.in_flight),
            calls_in_flight=len(kept.in_flight),
            branches=len(read.record.branches()),
            generated_tokens=read.record.generated_tokens,
            total_tokens=read.record.total_tokens,
            record_bytes=kept.size_bytes,
            expires_at=None if expires_at is None else datetime.fromtimestamp(expires_at, UTC),
        )


AWAY = (SessionStoreLost, StoreReplaced)
AT_ONCE = ("answer", "heard")
"""Methods that are called periodically, and so not again while the store is away."""


def session_store_client(handle: DeploymentHandle[Any]) -> SessionStore:
    """Raises `SessionStoreLost` if the store cannot be reached for `AWAY_S` seconds; `AT_ONCE` raise it at once."""
    return cast(SessionStore, _SessionStoreClient(handle))


class _SessionStoreClient(StoreClient):
    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        super().__init__(handle, SessionStoreLost, "The session store")
        call = super()._call
        # Generator replicas make these for each call of a session, many in one event-loop iteration. One batch for
        # each method: a plan does not wait for calls to be stored.
        self._batched: Mapping[str, CallBatcher[tuple[Any, ...], Any]] = {
            method: CallBatcher(at_once(partial(call, "batched", method)), bytes_of)
            for method, bytes_of in (("plan", _bytes_of_plan), ("add", _bytes_of_add))
        }

    async def _call(self, method: str, *arguments: Any, **named: Any) -> Any:
        if method in AT_ONCE:
            return await super()._call(method, *arguments, **named)
        if method in self._batched:
            # What was generated must not be lost because a database fails; of all else the caller is told.
            lost = StoreLost if method == "add" else AWAY
            return await attempts(lost)(self._batched[method].call, arguments)
        return await attempts(AWAY)(super()._call, method, *arguments, **named)


def _bytes_of_plan(arguments: tuple[Any, ...]) -> int:
    _, _, messages, _ = arguments
    return BYTES_PER_RECORD + bytes_of_json(messages)


def _bytes_of_add(arguments: tuple[Any, ...]) -> int:
    _, call = arguments
    tokens = sum(len(message.token_ids) for message in (*call.rendered, *call.generated))
    rendered = BYTES_PER_RECORD + bytes_of_json([message.message for message in call.rendered])
    texts = sum(2 * bytes_of_text(message.text) + bytes_of_columns(message.columns) for message in call.generated)
    return rendered + (BYTES_PER_TOKEN_ID + BYTES_PER_LOGPROB) * tokens + texts
