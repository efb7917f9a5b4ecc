"""The harness of verifiers, over the real package in its own Python environment, against a session with a script."""

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from examples.train_agent import verifiers_harness
from tests.clients.scripted_service import served

Answer = tuple[int, Any]


class ScriptedSessions:
    """Sessions that answer chat completions with the replies of their scripts."""

    def __init__(self, **replies: list[str]) -> None:
        """The keys of sessions, and what they reply."""
        self._replies = {name: iter(script) for name, script in replies.items()}
        self.asked: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in replies}
        self._app = Starlette(routes=[Route("/v1/chat/completions", self._answer, methods=["POST"])])

    async def played(self, harness: str, **indexes: int) -> dict[str, Answer]:
        """Status and body of the harness's answer for each session, whose tasks have these indexes."""

        async def play(client: httpx.AsyncClient, url: str, key: str, index: int) -> Answer:
            run = {"base_url": url, "api_key": key, "sample": {"extra_env_info": {"index": index}}}
            answer = await client.post(harness, json=run)
            return answer.status_code, answer.json() if answer.status_code == 200 else answer.text

        with served(self._app) as url:
            async with httpx.AsyncClient(timeout=None, trust_env=False) as client:
                answers = await asyncio.gather(*(play(client, url, *each) for each in indexes.items()))
        return dict(zip(indexes, answers, strict=True))

    async def _answer(self, request: Request) -> JSONResponse:
        key = request.headers["authorization"].removeprefix("Bearer ")
        self.asked[key].append((await request.json())["messages"])
        message = {"role": "assistant", "content": next(self._replies[key])}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
        named = {"id": "c", "object": "chat.completion", "created": 0, "model": "policy"}
        return JSONResponse({**named, "choices": [choice], "usage": usage})


@pytest.fixture(scope="module")
def sums() -> Iterator[str]:
    with verifiers_harness("sums_taskset") as url:
        yield url


@pytest.fixture(scope="module")
def guesses() -> Iterator[str]:
    with verifiers_harness("guess_taskset") as url:
        yield url


@pytest.mark.parametrize(
    ("reply", "rewards"), [("4", {"right": 2.0, "short": 1.0}), ("not four", {"right": 0, "short": 0})]
)
def test_one_turn_gives_its_weighted_rewards_by_name(sums: str, reply: str, rewards: dict[str, float]) -> None:
    sessions = ScriptedSessions(one=[reply])
    answers = asyncio.run(sessions.played(sums, one=3))
    [[system, question]] = sessions.asked["one"]
    assert (system["role"], system["content"]) == ("system", "Answer with a number.")
    assert (question["role"], question["content"]) == ("user", "What is 3 + 1?")
    assert answers == {"one": (200, {**rewards, "fragile": 0.0})}


def test_episodes_of_several_turns_that_are_played_at_once_do_not_mix(guesses: str) -> None:
    sessions = ScriptedSessions(seven=["9", "5", "7"], five=["5"])
    answers = asyncio.run(sessions.played(guesses, seven=7, five=5))
    said = [message["content"] for message in sessions.asked["seven"][-1]]
    assert said == ["Guess my number.", "9", "Lower.", "5", "Higher."]
    assert answers["seven"] == (200, {"found": pytest.approx(1 / 3)})
    assert answers["five"] == (200, {"found": 1.0})


def test_a_verifier_that_raises_fails_its_own_rollout(sums: str) -> None:
    sessions = ScriptedSessions(broken=["break"], whole=["1"])
    answers = asyncio.run(sessions.played(sums, broken=0, whole=0))
    status, problem = answers["broken"]
    assert status == 500
    assert "the episode failed: " in problem
    assert "the verifier broke" in problem
    assert answers["whole"][1]["right"] == 2.0


def test_a_task_that_is_not_there_is_refused(sums: str, guesses: str) -> None:
    sessions = ScriptedSessions()
    status, problem = asyncio.run(sessions.played(sums, none=5))["none"]
    assert (status, problem) == (422, "extra_env_info.index: the taskset has 5 tasks, from 0.")
    status, problem = asyncio.run(ScriptedSessions().played(guesses, none=2**40))["none"]
    assert status == 422, "a taskset without end is not loaded for ever"
    assert "1048576" in problem
