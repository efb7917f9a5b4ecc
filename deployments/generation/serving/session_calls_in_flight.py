"""The calls of sessions that are in flight in one replica. Store's half: `deployments/sessions/calls_in_flight.py`.

The store hears of them twice a second, and says which to abort. A store that starts again learns of them in this way.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_delay, wait_fixed

from deployments.failures import RolloutFailure, StoreLost
from deployments.generation.serving.template_renderer import TemplateRenderer
from deployments.protocols.generation import packed_ids
from deployments.protocols.images import ImageTokens
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
        self._in_flight: dict[str, str] = {}
        """The session of each call."""
        self._hearing: asyncio.Task[None] | None = None
        self.tasks = BackgroundTasks()

    async def begin(self, session_id: str, call_id: str, conversation: Conversation, context: ChatContext) -> Plan:
        """Raises what `SessionStore.plan` raises."""
        plan = await self._store.plan(session_id, call_id, conversation, context)
        self._in_flight[call_id] = session_id
        if self._hearing is None:
            self._hearing = asyncio.create_task(self._keep_heard())
        return plan

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
            await attempts(self._store.add, session_id, sent)
        finally:
            self._in_flight.pop(call.id, None)

    async def end(self, call_id: str) -> None:
        """Ends a call that generated nothing."""
        self._in_flight.pop(call_id, None)
        await self._store.end_call(call_id)

    def start(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Records a call, which nobody need wait for. A failure of it is logged."""
        task = self.tasks.start(work)
        task.add_done_callback(self._log_failure)
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


def log_retry(state: RetryCallState) -> None:
    logger.warning("A call of a session is not recorded yet: %s", state.outcome and state.outcome.exception())
