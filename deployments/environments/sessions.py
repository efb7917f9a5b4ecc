"""Slots and sessions of one environment replica.

`FairSlots` decides which steps run and which wait: requests take turns. `Sessions` holds state of rollouts that cannot
move to another replica.
"""

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from deployments.failures import Overloaded, RestartableSessionLost, SessionLost
from deployments.protocols.environments import StepRequest
from deployments.rpc.background_tasks import BackgroundTasks
from rollout_env import Session, StepOutcome, TaskEnvironment
from rollout_env.environment import forks_sessions
from rollout_env.steps import call, is_plain, opened_session, opener, validated_extra_env_info, validated_outcome

_CLOSE_TIMEOUT_S = 30.0
"""Time after which a session that is still closing no longer counts as one of `max_sessions`."""
logger = logging.getLogger("rollout_service.environments")


class FairSlots:
    """At most `limit` steps hold a slot at once.

    Guarantees: while steps wait, every slot is held; requests take turns, so a request of one step does not wait for
    all steps of a large one; the steps of one request get their slots in the order in which they came; a step that is
    cancelled while it waits takes no slot.
    """

    def __init__(self, limit: int | None) -> None:
        """Frees all slots; `limit` is None for no limit."""
        self._free = limit
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        """Futures of waiting steps by request, in the order of their turns."""

    @property
    def is_full(self) -> bool:
        """Whether a step would have to wait for its slot."""
        return self._free == 0

    async def acquire(self, request_id: str) -> None:
        """Returns when a step of the request has a slot, which the caller must release."""
        if self._free is None:
            return
        if self._free:
            self._free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(request_id, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                # The slot was given in the same iteration of the event loop.
                self.release()
            raise

    def release(self) -> None:
        """Gives the slot of a step to the step whose turn it is."""
        if self._free is None:
            return
        while self._waiting:
            request_id, turns = self._waiting.popitem(last=False)
            turn = turns.popleft()
            if turns:
                self._waiting[request_id] = turns
            if not turn.cancelled():
                turn.set_result(None)
                return
        self._free += 1


@dataclass(slots=True, eq=False)
class _SessionSlot:
    """A session of one rollout, or its reserved place."""

    session: Session | None = None
    """`None` until it is open."""
    is_stepping: bool = False
    idle: asyncio.TimerHandle | None = None
    """Closes the session after its idle time; `None` before its first step has ended."""


class Sessions:
    """Steps each rollout in the session that its first step has opened, or forked.

    Guarantees: a session that was opened is closed exactly once: when its rollout has ended or was cancelled, when a
    step of it fails, times out or is aborted, after `session_idle_s` without a step, or when the replica ends; at most
    `max_sessions` are open at once, including those being opened or closed, and those of starts; a step whose session
    is gone changes nothing and raises `SessionLost`.
    """

    def __init__(self, environment: TaskEnvironment, task_name: str) -> None:
        self._environment = environment
        self._task_name = task_name
        self._slots = FairSlots(environment.max_sessions)
        self._held: dict[str, _SessionSlot] = {}
        self._closing = BackgroundTasks()

    @property
    def count(self) -> int:
        return len(self._held)

    @asynccontextmanager
    async def reserve(self, request: StepRequest) -> AsyncIterator[None]:
        """Reserves a session for the block, which runs the step. Waits while `max_sessions` are open.

        Raises:
            SessionLost: the rollout had a session, and it is gone.
            Overloaded: no session can be opened now, and waiting for one would never end.
        """
        if request.session_id in self._held:
            yield
            return
        if not (request.is_start or self._can_be_opened(request)):
            raise self._lost()
        if request.lockstep_id and self._slots.is_full:
            raise Overloaded(
                f"A replica of task {self._task_name} holds at most {self._environment.max_sessions} sessions at once, "
                "and all rollouts of a request in lockstep need theirs at the same time. Send fewer rollouts, or "
                "choose the schedule async."
            )
        await self._slots.acquire(request.request_id)
        held = _SessionSlot()
        if not request.is_start:
            self._held[request.session_id] = held
        try:
            yield
        finally:
            if request.is_start:
                self._slots.release()
            elif held.session is None:
                self._end(request.session_id, held)

    async def step(self, request: StepRequest) -> StepOutcome:
        """Steps the rollout in its session, within `reserve`; opens it first if there is none.

        Raises:
            SessionLost: a step of the session is still running, or it was closed meanwhile.
            Exception: what the environment raises. The session is closed then.
        """
        state = validated_extra_env_info(self._environment, request.extra_env_info)
        held = self._held.get(request.session_id)
        if held is None or held.is_stepping:
            raise self._lost()
        held.is_stepping = True
        if held.idle is not None:
            held.idle.cancel()
        try:
            session = held.session
            if session is None:
                session = held.session = await self._opened(request, state)
            outcome = validated_outcome(await call(session.step, request.message_log, state))
        except BaseException:
            self._end(request.session_id, held)
            raise
        held.is_stepping = False
        if outcome.terminated:
            self._end(request.session_id, held)
        elif self._held.get(request.session_id) is held:
            idle_s = self._environment.session_idle_s
            held.idle = asyncio.get_running_loop().call_later(idle_s, self._end, request.session_id, held)
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
        await self._closing.ended()

    def _can_be_opened(self, request: StepRequest) -> bool:
        """Whether a session can be opened for this step: it is the first one, or the environment has what it takes."""
        if request.turn == 0 or self._environment.lost_session == "reopen":
            return True
        return request.turn == request.first_turn and forks_sessions(self._environment)

    async def _opened(self, request: StepRequest, state: Any) -> Session:
        """Opens a session. If cancelled while a thread opens it, closes the session as soon as it is open."""
        forks = 0 < request.turn == request.first_turn
        opening = asyncio.ensure_future(opened_session(self._environment, request.message_log, state, forks))
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(self._close_opened)
            if not is_plain(opener(self._environment, forks)):
                opening.cancel()
            raise

    def _close_opened(self, opening: "asyncio.Future[Session]") -> None:
        if not opening.cancelled() and opening.exception() is None:
            self._closing.start(self._close(opening.result(), has_slot=False))

    def _end(self, session_id: str, held: _SessionSlot) -> None:
        """Closes the session, if that has not begun; releases the slot of one that was not opened."""
        if self._held.get(session_id) is not held:
            return
        del self._held[session_id]
        if held.idle is not None:
            held.idle.cancel()
        if held.session is None:
            self._slots.release()
        else:
            self._closing.start(self._close(held.session, has_slot=True))

    def _lost(self) -> SessionLost:
        """The failure of a step whose session is gone."""
        if self._environment.lost_session == "fail":
            return SessionLost("The session of the rollout is gone, and with it the state of the rollout.")
        return RestartableSessionLost("The session of the rollout is gone: it must be played anew from its prompt.")

    async def _close(self, session: Session, has_slot: bool) -> None:
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await call(session.close)
        except Exception as error:
            context = {"task_name": self._task_name}
            logger.warning("A session of task %s was not closed.", self._task_name, exc_info=error, extra=context)
        finally:
            if has_slot:
                self._slots.release()
