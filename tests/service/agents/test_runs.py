"""Runs of agents over a session store without Ray: what a run gets, what its record comes to, when its session goes."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from deployments.failures import AgentFailed, Overloaded, RolloutFailure, SessionStoreLost
from deployments.protocols.environments import StepRequest
from deployments.sessions.records import ChatContext, OpenSession
from deployments.sessions.session_table import SessionsSettings
from deployments.sessions.store import SessionStore
from rollout_client.contract.rollouts import SampleInput
from rollout_client.contract.sessions import SessionInfo, SessionLimits, SessionRequest
from rollout_env import StepOutcome
from service.access.access_control import OPEN_TO_ALL
from service.access.keys import ANYBODY
from service.agents.sessions import AgentSessions, RequestAgents
from service.remote.policy import RemotePolicy
from service.rollouts.agent_episode import AgentRunOutcome, AgentRunRequest
from tests import virtual_time
from tests.fakes.policy_store import ScriptedStore
from tests.fakes.storage import ScriptedStorage
from tests.service.agents.agent_runs import record_call
from tests.service.scripted import ScriptedEnvironment
from tests.virtual_time import now

pytestmark = pytest.mark.true_clock

QUESTION = {"role": "user", "content": "Q"}
SAMPLE = SampleInput.model_validate(
    {"task_name": "task", "messages": [QUESTION], "extra_env_info": {"truth": 5}, "difficulty": 2}
)
Agent = Callable[["CallingProgram", str], Awaitable[None]]


@dataclass
class CallingProgram(ScriptedEnvironment):
    """Stands for the deployment that runs an agent: a step does what `agent` does with its session."""

    store: SessionStore = field(default_factory=lambda: SessionStore(SessionsSettings(), ScriptedStorage()))
    agent: Agent = field(default=lambda program, session_id: asks_twice(program, session_id))
    reward: dict[str, float] = field(default_factory=dict)
    failure: RolloutFailure | None = None
    was_cancelled: bool = False

    async def step(self, request: StepRequest) -> StepOutcome:
        self.requests.append(request)
        try:
            await self.agent(self, request.extra_env_info["base_url"].rpartition("/")[2])
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise
        if self.failure is not None:
            raise self.failure
        return StepOutcome({"role": "user", "content": ""}, self.reward, True, metrics={"agent_s": 2.0})

    async def ask(self, session_id: str, *messages: dict[str, Any], text: str = "A") -> str:
        return await record_call(self.store, session_id, messages, text)


async def asks_twice(program: CallingProgram, session_id: str) -> None:
    await program.ask(session_id, QUESTION)
    answered = {"role": "assistant", "content": "A"}
    await program.ask(session_id, QUESTION, answered, {"role": "user", "content": "S"}, text="B")


async def asks_and_waits(program: CallingProgram, session_id: str) -> None:
    await program.ask(session_id, QUESTION)
    await asyncio.Event().wait()


class Service:
    """What a run needs of a service."""

    def __init__(
        self,
        agent: Agent = asks_twice,
        settings: SessionsSettings | None = None,
        now_s: Callable[[], float] = time.time,
        **program: Any,
    ) -> None:
        self.store = SessionStore(settings or SessionsSettings(), ScriptedStorage(), now_s, now_s)
        policy = RemotePolicy(ScriptedStore())  # type: ignore[arg-type]
        sessions = AgentSessions(self.store, policy, OPEN_TO_ALL, {})
        self.program = CallingProgram([], store=self.store, agent=agent, **program)
        self.agents = RequestAgents(sessions, {"task": self.program}, "http://10.0.0.1:8000", ANYBODY)

    async def run(self, **session: Any) -> AgentRunOutcome:
        opened = SessionRequest(**{"sample": SAMPLE, "generation_index": 2, **session})
        return await self.agents.run(
            AgentRunRequest("task", opened, "r-0", "r-0-run-0", "request", idx=7, share_id="r")
        )

    async def sessions_left(self) -> int:
        await asyncio.sleep(0.001)
        return len(await self.store.infos(""))


async def test_a_run_has_the_record_of_its_session_which_is_deleted() -> None:
    service = Service(reward={"right": 1.0})
    run = await service.run()
    [branch] = run.branches
    assert [message.content for message in branch.message_log] == ["Q", "A", "S", "B"]
    assert [list(message.token_ids) for message in branch.message_log] == [[81, 1], [65], [83, 1], [66]]
    assert (run.calls, run.reward, run.metrics, run.failure) == (2, {"right": 1.0}, {"agent_s": 2.0}, None)
    assert await service.sessions_left() == 0


async def test_the_agent_gets_its_session_and_its_sample() -> None:
    service = Service()
    await service.run()
    [request] = service.program.requests
    call = request.extra_env_info
    assert call["base_url"].startswith("http://10.0.0.1:8000/v1/sessions/")
    assert call["api_key"].startswith("session-")
    assert call["sample"] == {
        "task_name": "task",
        "idx": 7,
        "messages": [QUESTION],
        "extra_env_info": {"truth": 5},
        "difficulty": 2,
    }
    assert (request.step_id, request.rollout_id, request.sample) == ("r-0-run-0", "r-0", 7)


async def test_columns_with_names_of_a_session_cost_a_rollout_none_of_its_tokens() -> None:
    columns = {"branch": "main", "session_id": "x", "generation_ids": [1], "shared_messages": "none", "level": 3}
    run = await Service().run(sample=SampleInput.model_validate({"task_name": "task", **columns}))
    [branch] = run.branches
    assert (run.failure, [list(message.token_ids) for message in branch.message_log][1]) == (None, [65])
    # The rollout has all of its columns from its request.
    assert (branch.model_extra, len(branch.generation_ids)) == ({"level": 3}, 2)


async def test_its_calls_share_the_engines_with_the_others_of_its_request() -> None:
    opened: list[Any] = []

    async def looks(program: CallingProgram, session_id: str) -> None:
        opened.append(await program.store.opened(session_id))

    await Service(looks).run()
    assert (opened[0].share_id, opened[0].request.generation_index) == ("r", 2)


async def test_a_run_that_fails_has_what_was_generated_until_then() -> None:
    failure = AgentFailed("The agent ended with exit code 1.")
    service = Service(failure=failure)
    run = await service.run()
    assert (run.failure, len(run.branches), run.reward) == (failure, 1, {})
    assert await service.sessions_left() == 0


@virtual_time.synchronous
async def test_a_session_is_kept_while_its_agent_makes_no_call() -> None:
    async def thinks(program: CallingProgram, session_id: str) -> None:
        for _ in range(20):
            await asyncio.sleep(60)
            await program.store.pass_time()
        await program.ask(session_id, QUESTION)

    service = Service(thinks, now_s=now)
    run = await service.run(limits=SessionLimits(idle_s=600))
    assert (run.calls, run.failure) == (1, None)

    running = asyncio.create_task(service.run(limits=SessionLimits(idle_s=600)))
    await asyncio.sleep(1)
    [session] = await service.store.infos("")
    assert session.expires_at is not None
    assert session.expires_at.timestamp() - now() <= 600
    await virtual_time.end_by_cancellation(running)


@pytest.mark.parametrize(
    ("limits", "limit"), [({"max_calls": 2}, "max_calls"), ({"max_tokens": 5}, "max_tokens"), ({"max_calls": 3}, None)]
)
async def test_a_run_says_which_limit_its_session_has_reached(limits: dict[str, int], limit: str | None) -> None:
    assert (await Service().run(limits=SessionLimits(**limits))).limit == limit


async def waiting_run(service: Service) -> "asyncio.Task[AgentRunOutcome]":
    """A run whose agent has had its first answer."""
    running = asyncio.create_task(service.run())
    while not sum(info.generated_tokens for info in await service.store.infos("")):
        await asyncio.sleep(0)
    return running


async def test_a_run_that_is_interrupted_returns_with_what_was_generated() -> None:
    service = Service(asks_and_waits)
    running = await waiting_run(service)
    assert service.agents.interrupt("r-0")
    run = await running
    assert ([message.content for message in run.branches[0].message_log], run.failure) == (["Q", "A"], None)
    assert service.program.was_cancelled
    assert not service.agents.interrupt("r-0")
    assert await service.sessions_left() == 0


async def test_a_run_that_is_cancelled_ends_its_agent_and_deletes_its_session() -> None:
    service = Service(asks_and_waits)
    running = await waiting_run(service)
    await virtual_time.end_by_cancellation(running)
    assert service.program.was_cancelled
    assert await service.sessions_left() == 0


@pytest.mark.parametrize("stage", ["the store was not asked yet", "the store has not answered yet"])
async def test_a_run_that_is_cancelled_while_its_session_is_opened_leaves_none(stage: str) -> None:
    service = Service()
    goes_on, opened, open_session = asyncio.Event(), asyncio.Event(), service.store.open

    async def open_slowly(session: OpenSession) -> SessionInfo:
        if stage == "the store was not asked yet":
            await goes_on.wait()
        info = await open_session(session)
        await goes_on.wait()
        opened.set()
        return info

    service.store.open = open_slowly  # type: ignore[method-assign, assignment]
    running = asyncio.create_task(service.run())
    await asyncio.sleep(0.001)
    await virtual_time.end_by_cancellation(running)
    goes_on.set()
    await asyncio.wait_for(opened.wait(), 60)
    assert await service.sessions_left() == 0
    assert not service.program.requests


async def test_calls_of_a_deleted_session_are_aborted() -> None:
    service = Service()

    async def leaves_a_call(program: CallingProgram, session_id: str) -> None:
        await program.ask(session_id, QUESTION)
        await program.store.plan(session_id, "open", [QUESTION], ChatContext())
        asyncio.get_running_loop().call_later(0.01, asyncio.ensure_future, program.store.end_call(session_id, "open"))

    service.program.agent = leaves_a_call
    assert len((await service.run()).branches) == 1
    assert await service.store.heard({"open": "gone"}) == ["open"]


async def test_a_session_for_which_there_is_no_room_is_a_run_to_be_made_again() -> None:
    service = Service(settings=SessionsSettings(max_bytes=1))
    assert isinstance((await service.run()).failure, Overloaded)
    assert not service.program.requests


async def test_a_record_that_is_lost_meanwhile_is_a_run_to_be_made_again() -> None:
    async def loses_its_record(program: CallingProgram, session_id: str) -> None:
        await program.store.delete(session_id, "")

    run = await Service(loses_its_record).run()
    assert isinstance(run.failure, SessionStoreLost)
    assert run.failure.retryable
