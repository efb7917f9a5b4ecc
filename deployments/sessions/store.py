"""The session store, one for the service: the Serve deployment that `store_client.SessionStoreClient` calls.

It holds the record of each session, which so outlives the agent, the ingress replica and the generator replica that
worked for it. What may begin is decided in `SessionTable`, what a conversation continues in `SessionRecord`.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime

from deployments import logs
from deployments.sessions.calls_in_flight import CallsInFlight
from deployments.sessions.drift import drift_report
from deployments.sessions.failures import (
    GenerationUnknown,
    SessionLimitReached,
    failure_of_refusal,
    session_unknown,
)
from deployments.sessions.records import ChatContext, ChatMessage, EngineCall, OpenSession, Plan
from deployments.sessions.samples import samples_of
from deployments.sessions.session_record import SessionRecord, UnknownGeneration
from deployments.sessions.session_table import SessionRefused, SessionTable
from deployments.sessions.settings import SessionsSettings
from rollout_client.contract import PolicyVersions
from rollout_client.policy_names import read_label
from rollout_client.problem_contract import FieldProblem
from rollout_client.session_contract import DriftReport, SessionInfo, SessionReward, SessionSamples, SessionStatus

TICK_S = 0.5
TOO_LARGE = "it is larger than sessions.max_bytes leaves room for; shorten it"


@dataclass(slots=True, eq=False)
class KeptSession:
    opened: OpenSession
    opened_bytes: int
    """Of what it was opened with."""
    record: SessionRecord = field(default_factory=SessionRecord)
    is_ended: bool = False


class SessionStore:
    """One replica. Times are in seconds of a monotonic clock.

    Every method that names a session raises `SessionUnknown` if it is not kept (any longer), or not of `namespace`.
    """

    def __init__(self, settings: SessionsSettings, now_s: Callable[[], float] = time.monotonic) -> None:
        logs.configure()
        self._now_s = now_s
        self._table = SessionTable(settings.max_sessions, settings.max_bytes)
        self._calls = CallsInFlight(settings.lease_s)
        self._sessions: dict[str, KeptSession] = {}
        self._ticking: asyncio.Task[None] | None = None

    async def answer(self) -> None:
        """Says that it lives."""

    # Called by the ingress.

    async def open(self, opened: OpenSession) -> SessionInfo:
        """Raises `SessionLimitReached`: all sessions that are kept have calls in flight."""
        if self._ticking is None:
            self._ticking = asyncio.create_task(self._tick())
        request = opened.request
        with refusals(opened.id):
            size_bytes = len(request.model_dump_json())
            self._drop(
                self._table.open(
                    opened.id, request.limits, self._now_s(), request.deadline_s, opened.namespace, size_bytes
                )
            )
        if opened.id not in self._table:
            raise SessionLimitReached(FieldProblem(field="sample", message=TOO_LARGE))
        self._sessions[opened.id] = KeptSession(opened, size_bytes)
        return self._info(opened.id)

    async def opened(self, session_id: str) -> OpenSession:
        """What the session was opened with, for whoever checks its key."""
        return self._kept(session_id, None).opened

    async def info(self, session_id: str, namespace: str) -> SessionInfo:
        self._used(session_id, namespace)
        return self._info(session_id)

    async def infos(self, namespace: str) -> list[SessionInfo]:
        names = [name for name, kept in self._sessions.items() if kept.opened.namespace == namespace]
        return [self._info(name) for name in names]

    async def samples(self, session_id: str, namespace: str) -> SessionSamples:
        kept = self._used(session_id, namespace)
        request = kept.opened.request
        samples = samples_of(session_id, kept.record, request.sample, request.generation_index)
        return SessionSamples(
            session_id=session_id,
            status=self._status(session_id),
            samples=samples,
            policy=policy_versions(kept.record),
        )

    async def drift(self, session_id: str, namespace: str) -> DriftReport:
        return drift_report(session_id, self._used(session_id, namespace).record.calls)

    async def reward(self, session_id: str, namespace: str, reward: SessionReward) -> SessionInfo:
        """Raises `GenerationUnknown`."""
        kept = self._used(session_id, namespace)
        try:
            kept.record.reward(reward.parts, reward.generation_id)
        except UnknownGeneration as error:
            problem = FieldProblem(field="generation_id", message=str(error), value=reward.generation_id)
            raise GenerationUnknown(problem) from error
        return self._info(session_id)

    async def end(self, session_id: str, namespace: str) -> SessionInfo:
        """Lets the session take no more calls, and aborts those in flight. Its record stays until it expires."""
        self._used(session_id, namespace).is_ended = True
        self._table.end(session_id, self._now_s())
        self._calls.abort({session_id})
        return self._info(session_id)

    # Called by a generator replica.

    async def plan(
        self, session_id: str, call_id: str, replica: str, messages: Sequence[ChatMessage], context: ChatContext
    ) -> Plan:
        """Begins a call and finds what its conversation continues.

        Raises:
            SessionClosed: the session takes no more calls.
            SessionLimitReached: not this one now.
            PromptRejected: the messages or tools are nested too deeply.
        """
        kept = self._kept(session_id, None)
        plan = kept.record.plan(messages, context, kept.opened.request.policy.name)
        with refusals(session_id):
            self._table.begin_call(session_id, self._now_s())
        self._calls.begin(call_id, session_id, replica, self._now_s())
        return plan

    async def add(self, session_id: str, call: EngineCall) -> None:
        """Records a call, and ends it. Doing it again changes nothing."""
        await self.end_call(call.id)
        if (kept := self._sessions.get(session_id)) is not None:
            kept.record.add(call)
            record = kept.record
            size_bytes = kept.opened_bytes + record.size_bytes
            self._drop(self._table.note_record(session_id, record.total_tokens, size_bytes))

    async def end_call(self, call_id: str) -> None:
        """Ends a call that generated nothing. Unknown ids are ignored."""
        if (session_id := self._calls.end(call_id)) is not None:
            self._table.end_call(session_id, self._now_s())

    async def heard(self, call_ids: Collection[str]) -> list[str]:
        """A replica makes these calls. Returns those that it must abort."""
        return self._calls.heard(call_ids, self._now_s())

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            await self.pass_time()

    async def pass_time(self) -> None:
        """Drops what has expired, aborts what is beyond its deadline, and ends the calls of replicas that are gone."""
        now = self._now_s()
        for call_id in self._calls.lost(now):
            await self.end_call(call_id)
        self._calls.abort(self._table.beyond_deadline(now))
        self._drop(self._table.drop_expired(now))

    def _drop(self, session_ids: Collection[str]) -> None:
        for session_id in session_ids:
            self._sessions.pop(session_id, None)

    def _kept(self, session_id: str, namespace: str | None) -> KeptSession:
        kept = self._sessions.get(session_id)
        if kept is None or (namespace is not None and kept.opened.namespace != namespace):
            raise session_unknown(session_id)
        return kept

    def _used(self, session_id: str, namespace: str) -> KeptSession:
        """The session, which something is asked of now."""
        kept = self._kept(session_id, namespace)
        self._table.use(session_id, self._now_s())
        return kept

    def _status(self, session_id: str) -> SessionStatus:
        kept, held = self._sessions[session_id], self._table.get(session_id)
        if kept.is_ended:
            return "ended"
        return "deadline" if held.deadline_at is not None and self._now_s() >= held.deadline_at else "open"

    def _info(self, session_id: str) -> SessionInfo:
        kept, held = self._sessions[session_id], self._table.get(session_id)
        record, expires_at = kept.record, held.expires_at
        left_s = None if expires_at is None else expires_at - self._now_s()
        return SessionInfo(
            id=session_id,
            base_url=kept.opened.base_url,
            status=self._status(session_id),
            calls=held.calls,
            calls_in_flight=held.in_flight,
            branches=len(record.branches()),
            generated_tokens=record.generated_tokens,
            total_tokens=record.total_tokens,
            record_bytes=held.size_bytes,
            expires_at=None if left_s is None else datetime.fromtimestamp(time.time() + left_s, UTC),
        )


def policy_versions(record: SessionRecord) -> PolicyVersions:
    """The oldest and the newest version that generated tokens of the record."""
    labels = {span.version for generated in record.generated for span in generated.weight_versions}
    if not labels:
        return PolicyVersions()
    return PolicyVersions(oldest=min(labels, key=number_of), newest=max(labels, key=number_of))


def number_of(label: str) -> int:
    return read_label(label).number


@contextmanager
def refusals(session_id: str) -> Iterator[None]:
    """Raises the failure of what the table refuses."""
    try:
        yield
    except SessionRefused as refused:
        raise failure_of_refusal(refused, session_id) from refused
