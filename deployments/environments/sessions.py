"""The sessions of one environment replica: what rollouts hold here that cannot travel to another replica."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from deployments.environments.step_queue import StepSlots
from deployments.failures import Overloaded, RestartableSessionLost, SessionLost
from deployments.protocols.environments import StepRequest
from rollout_env import ChatMessage, Session, StepOutcome, TaskEnvironment
from rollout_env.calls import call, is_plain
from rollout_env.steps import opened_session, validated_extra_env_info, validated_outcome

CLOSE_TIMEOUT_S = 30.0
"""A session that is not closed by then no longer counts as one of `max_sessions`."""
logger = logging.getLogger("rollout_service.environments")


@dataclass(slots=True, eq=False)
class SessionSlot:
    """A session of one rollout, or the room for it."""

    session: Session | None = None
    """`None` until it is open."""
    is_stepping: bool = False


class Sessions:
    """Steps each rollout in the session that its first step has opened.

    Guarantees: a session that was opened is closed exactly once: when its rollout has ended or was cancelled, when a
    step of it fails, times out or is aborted, after `session_idle_s` without a step, or when the replica ends; at most
    `max_sessions` are open at once, those included that are being opened or closed, and those of starts; a step whose
    session is gone changes nothing and raises `SessionLost`.
    """

    def __init__(self, environment: TaskEnvironment, task_name: str) -> None:
        self._environment = environment
        self._task_name = task_name
        self._room = StepSlots(environment.max_sessions)
        self._held: dict[str, SessionSlot] = {}
        self._expires_at: dict[str, float] = {}
        """Of the sessions in which no step runs, the first to expire first: all have the same limit."""
        self._timer: asyncio.TimerHandle | None = None
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def count(self) -> int:
        return len(self._held)

    @asynccontextmanager
    async def room(self, request: StepRequest) -> AsyncIterator[None]:
        """The block is the step: there is room for its session. Waits while `max_sessions` are open.

        Raises:
            SessionLost: the rollout had a session, and it is gone.
            Overloaded: no session can be opened now, and waiting for one would never end.
        """
        if request.session_id in self._held:
            yield
            return
        if not request.is_start and request.turn and self._environment.lost_session != "reopen":
            raise self._lost()
        await self._wait_for_room(request)
        if request.is_start:
            try:
                yield
            finally:
                self._room.release()
            return
        held = self._held[request.session_id] = SessionSlot()
        try:
            yield
        finally:
            if held.session is None:
                self._forget(request.session_id, held)

    async def step(self, request: StepRequest) -> StepOutcome:
        """Steps the rollout in its session, within `room`; opens it first if there is none.

        Raises:
            SessionLost: a step of the session is still running, or it was closed meanwhile.
            Exception: what the environment raises. The session is closed then.
        """
        state = validated_extra_env_info(self._environment, request.extra_env_info)
        held = self._held.get(request.session_id)
        if held is None or held.is_stepping:
            raise self._lost()
        held.is_stepping = True
        self._expires_at.pop(request.session_id, None)
        try:
            session = held.session
            if session is None:
                session = held.session = await self._opened(request.message_log, state)
            outcome = validated_outcome(await call(session.step, request.message_log, state))
        except BaseException:
            self._end(request.session_id, held)
            raise
        held.is_stepping = False
        if outcome.terminated:
            self._end(request.session_id, held)
        elif self._held.get(request.session_id) is held:
            self._start_idling(request.session_id)
        return outcome

    def release(self, session_ids: list[str]) -> None:
        """Closes the sessions of rollouts that have ended. Unknown ids are ignored."""
        for session_id in session_ids:
            held = self._held.get(session_id)
            # One that is being opened belongs to a step, whose abortion ends it.
            if held is not None and held.session is not None:
                self._end(session_id, held)

    async def close(self) -> None:
        """Closes all sessions."""
        self.release(list(self._held))
        while self._closing:
            await asyncio.wait(self._closing)

    async def _wait_for_room(self, request: StepRequest) -> None:
        if request.lockstep_id and self._room.is_full:
            raise Overloaded(
                f"A replica of task {self._task_name} holds at most {self._environment.max_sessions} sessions at once, "
                "and all rollouts of a request in lockstep need theirs at the same time. Send fewer rollouts, or "
                "choose the schedule async."
            )
        await self._room.acquire(request.request_id)

    async def _opened(self, message_log: list[ChatMessage], state: Any) -> Session:
        """Opens a session. One that a thread still opens when this is cancelled is closed as soon as it is open."""
        opening = asyncio.ensure_future(opened_session(self._environment, message_log, state))
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(self._close_opened)
            if not is_plain(self._environment.open_session):
                opening.cancel()
            raise

    def _close_opened(self, opening: "asyncio.Future[Session]") -> None:
        if not opening.cancelled() and opening.exception() is None:
            self._start_closing(opening.result(), has_room=False)

    def _end(self, session_id: str, held: SessionSlot) -> None:
        """Closes the session, if that has not begun."""
        if self._held.get(session_id) is not held:
            return
        if held.session is None:
            self._forget(session_id, held)
            return
        del self._held[session_id]
        self._expires_at.pop(session_id, None)
        self._start_closing(held.session, has_room=True)

    def _forget(self, session_id: str, held: SessionSlot) -> None:
        """Gives up the room for a session that was not opened."""
        if self._held.get(session_id) is held:
            del self._held[session_id]
            self._room.release()

    def _lost(self) -> SessionLost:
        """The failure of a step whose session is gone."""
        if self._environment.lost_session == "fail":
            return SessionLost("The session of the rollout is gone, and with it the state of the rollout.")
        return RestartableSessionLost("The session of the rollout is gone: it must be played anew from its prompt.")

    def _start_closing(self, session: Session, has_room: bool) -> None:
        task = asyncio.get_running_loop().create_task(self._close(session, has_room))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _close(self, session: Session, has_room: bool) -> None:
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await call(session.close)
        except Exception as error:
            context = {"task_name": self._task_name}
            logger.warning("A session of task %s was not closed.", self._task_name, exc_info=error, extra=context)
        finally:
            if has_room:
                self._room.release()

    def _start_idling(self, session_id: str) -> None:
        loop = asyncio.get_running_loop()
        expires_at = self._expires_at[session_id] = loop.time() + self._environment.session_idle_s
        if self._timer is None:
            self._timer = loop.call_at(expires_at, self._expire)

    def _expire(self) -> None:
        """Closes the sessions that were idle for too long, and sets the timer to the next one."""
        loop = asyncio.get_running_loop()
        self._timer = None
        for session_id, expires_at in list(self._expires_at.items()):
            if expires_at > loop.time():
                self._timer = loop.call_at(expires_at, self._expire)
                return
            context = {"task_name": self._task_name}
            logger.info(
                "A session of task %s is closed: it had no step for %g s.",
                self._task_name,
                self._environment.session_idle_s,
                extra=context,
            )
            self._end(session_id, self._held[session_id])
