"""The three kinds of agents, and what the deployment that runs them makes of their ends."""

import asyncio
import json
import time
from collections.abc import Callable
from contextlib import suppress
from math import inf, nan
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import httpx
import orjson
import psutil
import pytest
import uvloop
from pydantic import HttpUrl, ValidationError

from deployments.agents import programs
from deployments.agents.command_program import CommandProgram
from deployments.agents.environment import AgentRunsOfTask
from deployments.agents.programs import AgentCall, AgentNotLoadable, AgentProgram, HarnessProgram, RunNotes, _load_agent
from deployments.agents.settings import AgentSettings, CommandSettings, HarnessSettings
from deployments.failures import AgentFailed, AgentTimedOut, EnvironmentLost
from deployments.strict_settings import KeyMissing
from rollout_env import StepOutcome
from tests.deployments.agents import agents_of_tests
from tests.virtual_time import end_by_cancellation

CALL = AgentCall(
    base_url="http://127.0.0.1:8000/v1/sessions/s",
    api_key="session-key",
    sample={"task_name": "task", "idx": 4, "messages": [{"role": "user", "content": "Q"}]},
)
FUNCTIONS = "tests.deployments.agents.agents_of_tests"


def stepped(**settings: Any) -> StepOutcome:
    """What one run of such an agent comes to."""
    return asyncio.run(AgentRunsOfTask(AgentSettings(**settings)).step([], CALL))


def command(script: str, **settings: Any) -> dict[str, Any]:
    return {"command": CommandSettings(argv=["sh", "-c", script], **settings)}


def function(name: str, **settings: Any) -> dict[str, Any]:
    return {"import_path": f"{FUNCTIONS}:{name}", **settings}


def test_a_function_gets_its_session_and_its_sample_and_gives_its_reward() -> None:
    agents_of_tests.SEEN.clear()
    outcome = stepped(**function("rewarded"))
    [(base_url, api_key, sample)] = agents_of_tests.SEEN
    assert (base_url, api_key) == ("http://127.0.0.1:8000/v1/sessions/s/v1", "session-key")
    assert (sample.task_name, sample.idx, sample.messages and sample.messages[0].content) == ("task", 4, "Q")
    assert (outcome.reward, outcome.terminated) == ({"reward": 0.5}, True)
    assert stepped(**function("silent")).reward == {}


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("agents", "agents is not package.module:function"),
        ("no_such_module:agent", "takes base_url, api_key, sample: ModuleNotFoundError"),
        (f"{FUNCTIONS}:missing", "AttributeError"),
        (f"{FUNCTIONS}:NO_FUNCTION", "TypeError"),
        (f"{FUNCTIONS}:plain", "write async def plain"),
        (f"{FUNCTIONS}:of_two", "TypeError: too many positional arguments"),
    ],
)
def test_what_is_no_agent_is_refused_with_a_sentence(path: str, message: str) -> None:
    with pytest.raises(AgentNotLoadable, match=message):
        _load_agent(path)


def test_a_command_finds_its_session_in_variables_and_its_sample_on_stdin() -> None:
    script = (
        '[ "$OPENAI_BASE_URL $OPENAI_API_KEY" = "http://127.0.0.1:8000/v1/sessions/s/v1 session-key" ] || exit 1; '
        '[ "$ANTHROPIC_BASE_URL" = "http://127.0.0.1:8000/v1/sessions/s" ] || exit 2; '
        '[ "$OWN" = "x" ] || exit 3; '
        'grep -q \'"idx":4\' || exit 4; cmp -s sample.json "$ROLLOUT_SAMPLE_FILE" || exit 5; '
        'echo \'{"right": 1, "style": 0.5}\' > "$ROLLOUT_REWARD_FILE"'
    )
    assert stepped(**command(script, environment_variables={"OWN": "x"})).reward == {"right": 1.0, "style": 0.5}


NUMBERS = [2**64, -(2**63) - 1, 10**30, 10**4299, 0.1, 5e-324, 1e300]


def test_a_command_and_a_harness_get_numbers_exactly(tmp_path: Path) -> None:
    call = CALL.model_copy(update={"sample": {**CALL.sample, "extra_env_info": {"a": [*NUMBERS, nan, -inf]}}})
    asyncio.run(CommandProgram(command(f"cat > {tmp_path}/given")["command"]).run(call, RunNotes()))
    posted: list[bytes] = []

    def answer(request: httpx.Request) -> httpx.Response:
        posted.append(request.content)
        return httpx.Response(200)

    asyncio.run(harness(answer).run(call, RunNotes()))
    given = json.loads((tmp_path / "given").read_bytes())
    assert given["extra_env_info"]["a"] == [*NUMBERS, None, None]
    assert json.loads(posted[0]) == {**call.model_dump(exclude={"sample"}), "sample": given}


def test_a_command_gets_no_secret_of_the_service_and_leaves_no_core_dump(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_THE_SERVICE", "1")
    assert stepped(**command('[ -z "$SECRET_OF_THE_SERVICE" ] && [ "$(ulimit -c)" = 0 ]')).reward == {}
    passed = command('[ -n "$SECRET_OF_THE_SERVICE" ]', passed_variables=["PATH", "SECRET_OF_THE_SERVICE"])
    assert stepped(**passed).reward == {}


NO_PROGRAM = {"command": CommandSettings(argv=["no-such-program"])}


@pytest.mark.parametrize(
    ("agent", "failure", "message"),
    [
        (function("broken"), AgentFailed, "The agent raised ValueError: no such tool"),
        (function("not_now"), EnvironmentLost, "The agent cannot be run just now: the shop is closed"),
        (function("worthless"), AgentFailed, r"What the agent returned is not a reward: .* got 'good'"),
        (function("endless", timeout_s=0.01), AgentTimedOut, r"was ended after 0.01 s, its timeout_s"),
        (command("echo no file >&2; exit 3"), AgentFailed, "code 3. It wrote to stderr last: no file$"),
        (command("exit 1"), AgentFailed, "ended with exit code 1. It wrote nothing to stderr.$"),
        (command("exit 75"), EnvironmentLost, r"cannot be run just now \(exit code 75\)"),
        (command("kill -9 $$"), AgentFailed, "was ended by signal SIGKILL"),
        (command("echo good > reward.json"), AgentFailed, "reward.json of the agent is not JSON"),
        (command("ln -s /etc/passwd reward.json"), AgentFailed, "reward.json of the agent cannot be read"),
        (NO_PROGRAM, AgentFailed, r"exit code \d+. It wrote to stderr last: .*no-such-program"),
    ],
)
def test_a_failed_agent_says_how_and_last_words(agent: dict[str, Any], failure: type[Exception], message: str) -> None:
    with pytest.raises(failure, match=message):
        stepped(**agent)


def test_of_long_output_the_end_is_kept() -> None:
    with pytest.raises(AgentFailed, match=r"last: \.\.\.a+the end$") as raised:
        stepped(**command("head -c 100000 /dev/zero | tr '\\0' a >&2; printf 'the end' >&2; exit 1"))
    assert len(str(raised.value)) < 2200


def test_a_command_may_leave_its_stdin_unread_however_long_it_is() -> None:
    long = CALL.model_copy(update={"sample": {"task_name": "task", "text": "x" * 2**20}})
    runs = AgentRunsOfTask(AgentSettings(**command("exit 0")))
    assert asyncio.run(runs.step([], long)).reward == {}


async def ended_when_cancelled(program: AgentProgram, alive: Path) -> int:
    """Cancels a run once it has written its process id, and returns that."""
    run = asyncio.create_task(program.run(CALL, RunNotes()))
    while not (pid := written_pid(alive)):
        await asyncio.sleep(0.001)
    await end_by_cancellation(run)
    return pid


def written_pid(file: Path) -> int:
    text = file.read_text() if file.exists() else ""
    return int(text) if text.endswith("\n") else 0


@pytest.mark.parametrize("deaf", [False, True])
def test_a_command_that_is_cancelled_ends_with_all_of_its_group(deaf: bool, tmp_path: Path) -> None:
    alive = tmp_path / "pid"
    script = f"{'trap : TERM; ' if deaf else ''}sleep 1000 & echo $! > {alive}; while :; do wait; done"
    assert_ended(asyncio.run(ended_when_cancelled(CommandProgram(CommandSettings(argv=["sh", "-c", script])), alive)))


def assert_ended(pid: int) -> None:
    """Waits until the process has ended, which it was told to; nobody may have waited for it."""
    given_up_at = time.monotonic() + 30
    with suppress(psutil.NoSuchProcess):
        while psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
            assert time.monotonic() < given_up_at
            time.sleep(0.001)


def test_what_a_command_leaves_behind_ends_with_it(tmp_path: Path) -> None:
    pid_file, folder = tmp_path / "pid", tmp_path / "folder"
    stepped(**command(f"touch there; pwd > {folder}; sleep 1000 & echo $! > {pid_file}"))
    assert not Path(folder.read_text().strip()).exists(), "it runs in a folder of its own"
    assert_ended(int(pid_file.read_text()))


def harness(answer: Callable[[httpx.Request], httpx.Response], **settings: Any) -> HarnessProgram:
    def client(_url: str, headers: dict[str, str]) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.MockTransport(answer), headers=headers)

    with patch.object(programs, "http_client", client):
        return HarnessProgram(HarnessSettings(url=HttpUrl("http://harness.test/run"), **settings))


def asked(answer: Callable[[httpx.Request], httpx.Response], **settings: Any) -> dict[str, float]:
    return asyncio.run(harness(answer, **settings).run(CALL, RunNotes()))


def test_a_harness_is_posted_its_session_and_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARNESS_KEY", "secret")
    seen: list[Any] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append((str(request.url), request.headers["authorization"], orjson.loads(request.content)))
        return httpx.Response(200, json={"reward": 1})

    assert asked(answer, api_key_variable="HARNESS_KEY") == {"reward": 1.0}
    assert seen == [("http://harness.test/run", "Bearer secret", CALL.model_dump())]


@pytest.mark.parametrize(("body", "reward"), [(b"0.5", {"reward": 0.5}), (b"null", {}), (b"", {})])
def test_a_harness_answers_its_reward_or_none(body: bytes, reward: dict[str, float]) -> None:
    assert asked(lambda _: httpx.Response(200, content=body)) == reward


@pytest.mark.parametrize(
    ("response", "failure", "message"),
    [
        (httpx.Response(500, text="stack trace"), AgentFailed, "answered 500. stack trace"),
        (httpx.Response(503, text="busy"), EnvironmentLost, "answered 503. busy"),
        (httpx.Response(200, text="fine"), AgentFailed, "answered without JSON: fine"),
        (httpx.Response(200, content=b"1" * 2**21), AgentFailed, "more than 1048576 bytes"),
        (httpx.ConnectError("refused"), EnvironmentLost, "does not answer"),
    ],
)
def test_a_harness_that_fails_says_what_it_said(
    response: httpx.Response | Exception, failure: type[Exception], message: str
) -> None:
    with pytest.raises(failure, match=message):
        asked(Mock(side_effect=[response]))


def test_a_harness_whose_key_is_not_there_is_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HARNESS_KEY", raising=False)
    with pytest.raises(KeyMissing, match="HARNESS_KEY holds no key"):
        harness(lambda _: httpx.Response(200), api_key_variable="HARNESS_KEY")


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"import_path": "a:b", "command": {"argv": ["c"]}},
        {"command": {"argv": []}},
        {"command": {"argv": ["c"], "folders": ["/data"]}},
        {"command": {"argv": ["c"], "folders": ["data"], "sandbox": True}},
        {"harness": {"url": "http://me:secret@harness.test"}},
        {"import_path": "a:b", "scored_by": "nobody"},
        {"import_path": "a:b", "timeout_s": 0},
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        AgentSettings.model_validate(settings)


@pytest.mark.parametrize(
    ("settings", "most"),
    [(command("exit 0"), 16), ({**command("exit 0"), "max_concurrent_runs": 3}, 3), (function("silent"), None)],
)
def test_commands_share_a_replica_in_bounded_number(settings: dict[str, Any], most: int | None) -> None:
    assert AgentRunsOfTask(AgentSettings(**settings)).max_concurrent_steps == most


def test_commands_run_in_the_event_loop_of_a_replica() -> None:
    runs = AgentRunsOfTask(AgentSettings(**command("echo 0.5 > reward.json; echo bad >&2; exit 4")))
    failing = pytest.raises(AgentFailed, match=r"last: bad$")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner, failing:
        runner.run(runs.step([], CALL))
