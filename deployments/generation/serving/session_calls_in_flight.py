"""The calls of sessions that are in flight in one replica. Store's half: `deployments/sessions/session_table.py`.

The store hears of them twice a second, and says which to abort. A store that starts anew learns of them in this way.

A call is planned by the store, or with the replica's copy of the record: then the engine begins at once, and the store
confirms the call meanwhile.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_delay, wait_fixed

from deployments.failures import RolloutFailure, StoreLost
from deployments.generation.serving.record_copies import RecordCopies, RecordOutdated
from deployments.generation.serving.template_renderer import TemplateRenderer
from deployments.protocols.generation import packed_ids
from deployments.protocols.images import ImageTokens
from deployments.protocols.token_columns import EXPERTS
from deployments.rpc.background_tasks import BackgroundTasks
from deployments.sessions.failures import SessionUnknown
from deployments.sessions.records import ChatContext, Conversation, EngineCall, Plan

if TYPE_CHECKING:
    from deployments.sessions.store import SessionStore

HEARD_EVERY_S = 0.5
ADD_RETRY_S = 0.5
ADD_WITHIN_S = 60.0
"""How long a record waits for a store that does not answer, or whose database fails."""
NO_IDS = packed_ids(())
logger = logging.getLogger("rollout_service.generation")


class SessionCallsInFlight:
    def __init__(
        self,
        store: "SessionStore",
        renderer: TemplateRenderer,
        interrupt: Callable[[Sequence[str]], Awaitable[None]],
        image_tokens: Callable[[Sequence[str]], Awaitable[Sequence[ImageTokens]]],
    ) -> None:
        """`interrupt` lets generations of these ids end with the tokens that they have.

        `image_tokens` gives the tokens of images; it raises as `EngineImages.tokens`.
        """
        self.renderer = renderer
        self._store = store
        self.interrupt = interrupt
        self.image_tokens = image_tokens
        self._copies = RecordCopies()
        self._in_flight: dict[str, str] = {}
        """The session of each call."""
        self._hearing: asyncio.Task[None] | None = None
        self.tasks = BackgroundTasks()

    async def begin(self, session_id: str, call_id: str, conversation: Conversation, context: ChatContext) -> Plan:
        """Raises what `SessionStore.plan` raises."""
        plan = await self._store.plan(session_id, call_id, conversation, context)
        self._note(session_id, call_id)
        return plan

    async def begin_with_copy(
        self,
        session_id: str,
        call_id: str,
        conversation: Conversation,
        context: ChatContext,
        policy: str | None,
        in_thread: bool,
    ) -> "tuple[Plan, asyncio.Task[None]] | None":
        """As `begin`, before the store knows of the call. `None` if there is no copy of the record.

        Args:
            policy: the named policy of the session.
            in_thread: for long conversations.

        Returns:
            The plan, and what ends when the store has confirmed it. That raises `RecordOutdated`, and what
            `SessionStore.begin` raises.
        """
        planned = await self._copies.plan(session_id, conversation, context, policy, in_thread)
        if planned is None:
            return None
        plan, known = planned
        return plan, self._start(self._confirm(session_id, call_id, known))

    async def _confirm(self, session_id: str, call_id: str, known: int) -> None:
        later = await self._store.begin(session_id, call_id, known)
        self._note(session_id, call_id)
        if later is None or not all(self._is_own(session_id, other) for other in later):
            self._copies.drop(session_id)
            raise RecordOutdated("Another replica has made a call of the session.")

    def _is_own(self, session_id: str, call_id: str) -> bool:
        """Whether this replica makes the call, or has made it: the conversation at hand was not answered by another."""
        return call_id in self._in_flight or self._copies.has_call(session_id, call_id)

    def _note(self, session_id: str, call_id: str) -> None:
        self._in_flight[call_id] = session_id
        if self._hearing is None:
            self._hearing = asyncio.create_task(self._keep_heard())

    async def add(self, session_id: str, call: EngineCall) -> None:
        """Tries again for `ADD_WITHIN_S` while nothing can be stored: what was generated must not be lost.

        Raises:
            StoreLost: in the end.
            SessionUnknown: the session was dropped meanwhile, and its record with it.
        """
        attempts = AsyncRetrying(
            retry=retry_if_exception_type(StoreLost),
            wait=wait_fixed(ADD_RETRY_S),
            stop=stop_after_delay(ADD_WITHIN_S),
            before_sleep=log_retry,
            reraise=True,
        )
        # The store that gets the plan with the call has its ids.
        sent = replace(call, plan=replace(call.plan, token_ids=NO_IDS, response_ids=NO_IDS, images=()))
        try:
            place: int | None = await attempts(self._store.add, session_id, sent)
            await self._copies.add(session_id, without_numbers(sent), place)
        finally:
            self._in_flight.pop(call.id, None)

    async def end(self, call_id: str) -> None:
        """Ends a call that generated nothing."""
        self._in_flight.pop(call_id, None)
        await self._store.end_call(call_id)

    def start(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Records a call, which nobody need wait for. A failure of it is logged."""
        task = self._start(work)
        task.add_done_callback(self._log_failure)
        return task

    def _start(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = self.tasks.start(work)
        # Asyncio would complain of a failure that nobody asks for.
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        return task

    def _log_failure(self, task: "asyncio.Task[None]") -> None:
        if task.cancelled() or isinstance(failure := task.exception(), SessionUnknown):
            # Whoever waits for the answer is told; nobody wants the record.
            return
        if failure is not None:
            known = isinstance(failure, RolloutFailure)
            logger.warning("A call of a session is not recorded: %s", failure, exc_info=None if known else failure)

    async def _keep_heard(self) -> None:
        try:
            while self._in_flight:
                await asyncio.sleep(HEARD_EVERY_S)
                try:
                    await self.interrupt(await self._store.heard(dict(self._in_flight)))
                except RolloutFailure as failure:
                    logger.info("The session store did not hear of the calls here: %s", failure)
        finally:
            self._hearing = None


def without_numbers(call: EngineCall) -> EngineCall:
    """The call for a copy of the record, which plans with the number of rows that the experts have."""
    generated = [
        replace(
            one,
            columns={
                name: column.model_copy(update={"data": b""}) for name, column in one.columns.items() if name == EXPERTS
            },
        )
        if one.columns
        else one
        for one in call.generated
    ]
    return replace(call, generated=generated)


def log_retry(state: RetryCallState) -> None:
    logger.warning("A call of a session is not recorded yet: %s", state.outcome and state.outcome.exception())
