"""The bridge to OpenEnv servers, over a real server of the package in a Python environment of its own."""

import asyncio
import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from deployments.environments.step_runner import StepRunner
from deployments.failures import EnvironmentLost, RestartableSessionLost
from deployments.protocols.environments import StepRequest
from deployments.tasks.bridges.openenv import OpenEnvEnvironment, ServerError, _OpenEnvInfo
from rollout_env import SampleRejected, TemporaryFailure, check, play
from service.startup.config import free_port
from tests.deployments.tasks.bridges.hosted_environments import wait_until_it_answers
from tests.paths import BRIDGED
from tests.virtual_time import runs

SERVER = str(BRIDGED / "openenv_server.py")
MOST_SOCKETS = 4


@contextmanager
def server(*arguments: str) -> Iterator[str]:
    """Its URL."""
    python = str(Path(os.environ["ROLLOUT_BRIDGES"]) / "openenv" / "bin" / "python")
    port = free_port()
    with subprocess.Popen([python, SERVER, str(port), *arguments]) as process:
        url = f"http://127.0.0.1:{port}"
        try:
            wait_until_it_answers(lambda: made(url), process)
            yield url
        finally:
            process.kill()


def made(url: str, **arguments: Any) -> OpenEnvEnvironment:
    checked: Any = url
    return OpenEnvEnvironment(checked, **arguments)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with server() as running:
        yield running


def sample(seed: int = 3, **reset: Any) -> dict[str, Any]:
    return {"extra_env_info": {"seed": seed, "reset": reset}}


def action(**fields: Any) -> str:
    return f"So: <action>{json.dumps(fields)}</action>"


def test_an_episode_is_played_with_text_as_actions(url: str) -> None:
    environment = made(url, action_field="word", observation_field="text")
    played = play(environment, ["one", "two", "three", "four"], sample())
    assert [message["content"] for message in played.message_log] == [
        "seed 3", "one", "one 1", "two", "two 2", "three", "three 3",
    ]  # fmt: skip
    assert (played.total_reward, played.terminated) == (1.5, True)


def test_an_episode_is_played_with_json_as_actions(url: str) -> None:
    played = play(made(url), [action(word="go", times=2), action(word="on", times=3)], sample(goal=5))
    first = played.message_log[0]["content"]
    assert first.startswith('Answer with <action>JSON</action>. The fields of the JSON object are: {"word": ')
    assert first.endswith('{"text": "seed 3"}')
    assert played.message_log[2]["content"] == '{"text": "go 2"}'
    assert (played.total_reward, played.terminated) == (2.5, True)


def test_what_is_wrong_with_an_action_is_told_and_the_episode_goes_on(url: str) -> None:
    environment = made(url, observation_field="text")
    replies = ["go", "<action>{</action>", action(times=1), action(word="go")]
    told = [message["content"] for message in play(environment, replies, sample()).message_log[2::2]]
    missing = "There was no action: write it as JSON between <action> and </action>."
    assert told == [missing, missing, "The action is not valid: Invalid message: Field required.", "go 1"]


def test_an_environment_that_raises_fails_its_sample(url: str) -> None:
    with pytest.raises(ServerError, match="the OpenEnv server answered EXECUTION_ERROR: the word is raise"):
        play(made(url, action_field="word"), ["raise"], sample())


def test_a_socket_is_closed_with_its_rollout_and_none_is_left(url: str) -> None:
    environment = made(url, action_field="word")
    for _ in range(3 * MOST_SOCKETS):
        play(environment, ["one"], sample())


@runs
async def test_a_server_without_room_is_a_temporary_failure(url: str) -> None:
    environment = made(url, action_field="word")

    info = _OpenEnvInfo(seed=1)
    held = [await environment.open_session([], info) for _ in range(MOST_SOCKETS)]
    with pytest.raises(TemporaryFailure, match="has no room"):
        await environment.open_session([], info)
    for session in held:
        closing = session.close()
        assert closing is not None
        await closing
    last = (await environment.open_session([], info)).close()
    assert last is not None
    await last


def test_a_socket_that_drops_is_a_retryable_failure() -> None:
    with ExitStack() as stack:
        environment = made(stack.enter_context(server()), action_field="word", observation_field="text")

        def step(reply: str, turn: int) -> StepRequest:
            log: Any = [{"role": "assistant", "content": reply}]
            return StepRequest(log, {"seed": 1}, step_id=f"{turn}", session_id="rollout", turn=turn)

        async def story() -> None:
            runner = StepRunner(environment, "openenv", None)
            await runner.start(step("one", 0), set())
            dropped = await runner.start(step("die", 1), set())
            assert isinstance(dropped, EnvironmentLost)
            assert "dropped" in str(dropped)
            assert isinstance(await runner.start(step("die", 1), set()), RestartableSessionLost)
            unreachable = await runner.start(step("one", 0), set())
            assert isinstance(unreachable, EnvironmentLost)
            assert "cannot be reached" in str(unreachable)

        asyncio.run(story())


def test_a_server_that_is_not_seeded_is_noticed() -> None:
    told = "gave another first observation for the seed 3: it is not seeded"
    with server("unseeded") as url, pytest.raises(SampleRejected, match=told):
        play(made(url, action_field="word"), ["one"], sample())


def test_a_missing_server_and_a_missing_field_are_named(url: str) -> None:
    with pytest.raises(TemporaryFailure, match="does not tell its schemas"):
        made("http://127.0.0.1:9")
    with pytest.raises(ValueError, match="have no field text, but"):
        made(url, action_field="text")


def test_it_keeps_the_rules_for_environments(url: str) -> None:
    check(made(url), replies=[action(word="a"), action(word="b")], samples=2, max_block_s=30)
