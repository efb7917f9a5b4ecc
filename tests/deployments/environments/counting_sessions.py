"""Environments whose rollouts hold a count in memory, and write down what becomes of it."""

import asyncio
import threading
from typing import Any

from pydantic import BaseModel

from deployments.protocols.environments import StepRequest
from rollout_env import ChatMessage, LostSession, Session, StepOutcome, TemporaryFailure
from tests.fakes.environment import StepsAlone
from tests.service.scripted import outcome

POLL_S = 0.005
OPENS_WITHIN_S = 40.0


class Wish(BaseModel):
    """What a step or the opening of a session does. Each step has a state of its own here."""

    step_s: float = 0.0
    close_s: float = 0.0
    fails: bool = False
    open_fails: bool = False
    opens_late: bool = False
    """Whether the session is opened only when the environment's `may_open` is set."""
    ends: bool = False


class CountingSession(Session):
    """Counts its steps: a count that goes on proves that it was the same session."""

    def __init__(self, environment: "CountingSessions", name: int, count: int, wish: Wish) -> None:
        self.environment = environment
        self.name = name
        self.count = count
        self.close_s = wish.close_s

    async def step(self, message_log: list[ChatMessage], extra_env_info: Wish) -> StepOutcome:
        await asyncio.sleep(extra_env_info.step_s)
        if extra_env_info.fails:
            raise TemporaryFailure("The socket was closed.")
        self.count += 1
        return outcome(f"{self.name}:{self.count}", terminated=extra_env_info.ends)

    async def close(self) -> None:
        await asyncio.sleep(self.close_s)
        self.environment.closed.append(self.name)


class CountingSessions(StepsAlone):
    """Each step answers the number of its session and of the step in it."""

    ExtraEnvInfo = Wish

    def __init__(
        self,
        lost_session: LostSession = "restart",
        max_sessions: int | None = None,
        session_idle_s: float = 1000.0,
        max_concurrent_steps: int | None = None,
    ) -> None:
        self.lost_session = lost_session
        self.max_sessions = max_sessions
        self.session_idle_s = session_idle_s
        self.max_concurrent_steps = max_concurrent_steps
        self.may_open = threading.Event()
        self.opening = 0
        """How many sessions with `opens_late` are being opened."""
        self.opened = 0
        self.closed: list[int] = []
        """The numbers of the sessions, in the order in which they were closed."""

    @property
    def open_sessions(self) -> int:
        return self.opened - len(self.closed)

    async def open_session(self, message_log: list[ChatMessage], extra_env_info: Wish) -> Session:
        if not extra_env_info.opens_late:
            return self.made(message_log, extra_env_info)
        self.opening += 1
        try:
            while not self.may_open.is_set():
                await asyncio.sleep(POLL_S)
            return self.made(message_log, extra_env_info)
        finally:
            self.opening -= 1

    def made(self, message_log: list[ChatMessage], wish: Wish) -> Session:
        if wish.open_fails:
            raise TemporaryFailure("The server does not answer.")
        self.opened += 1
        played = sum(message["role"] == "assistant" for message in message_log)
        return CountingSession(self, self.opened, played, wish)


class BlockingSessions(CountingSessions):
    """Opens sessions in a thread."""

    def open_session(  # type: ignore[override]  # plain instead of async, as each may be
        self, message_log: list[ChatMessage], extra_env_info: Wish
    ) -> Session:
        if not extra_env_info.opens_late:
            return self.made(message_log, extra_env_info)
        self.opening += 1
        assert self.may_open.wait(OPENS_WITHIN_S)
        session = self.made(message_log, extra_env_info)
        self.opening -= 1
        return session


class ForkingSessions(CountingSessions):
    """Makes sessions that stand at a later turn, of which it counts the calls."""

    forked = 0

    async def fork_session(self, message_log: list[ChatMessage], extra_env_info: Wish) -> Session:
        self.forked += 1
        return await self.open_session(message_log, extra_env_info)


def step_of(rollout: str, turn: int = 0, lockstep_id: str = "", first_turn: int = 0, **wish: Any) -> StepRequest:
    """The step of one turn of a rollout, whose log was posted with `first_turn` of them."""
    log: list[ChatMessage] = [{"role": "user", "content": "Q"}]
    for _ in range(turn):
        log += [{"role": "assistant", "content": "A"}, {"role": "user", "content": "O"}]
    return StepRequest(
        [*log, {"role": "assistant", "content": "A"}],
        wish,
        request_id=rollout,
        step_id=f"{rollout}-{turn}",
        session_id=rollout,
        turn=turn,
        first_turn=first_turn,
        lockstep_id=lockstep_id,
    )
