"""Rollouts of Harbor's tasks, run for real under bubblewrap. Skipped where it does not work."""

import asyncio
import itertools
import random
import shlex
from collections.abc import Callable, Coroutine
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, patch

import pytest

from deployments.agents import harbor_program
from deployments.agents.environment import AgentRunsOfTask
from deployments.agents.harbor_program import HarborProgram
from deployments.agents.programs import AgentCall, RunNotes
from deployments.agents.settings import AgentSettings
from deployments.failures import AgentFailed, EnvironmentLost, EnvironmentRejected, VerifierFailed
from deployments.harbor.tasks import tasks_within
from deployments.sandbox.providers import leftover
from deployments.sandbox.providers.interface import ProviderUnusable, RunningSandbox, SandboxSpec
from deployments.sandbox.providers.local import LocalProvider
from rollout_client.contract.rollouts import SampleInput
from tests import virtual_time
from tests.deployments.agents.harbor_rollouts import (
    COMMAND,
    KILLED,
    NAMES,
    TASKS,
    processes_with,
    reward_of,
    sample_of,
    strike,
)
from tests.deployments.models.chat_server import Answer, chat_server


def works() -> bool:
    try:
        LocalProvider().close()
    except ProviderUnusable:
        return False
    return True


pytestmark = [pytest.mark.slow, pytest.mark.skipif(not works(), reason="bubblewrap does not work on this machine")]


def with_program(
    work: Callable[[HarborProgram, Callable[[dict[str, Any]], AgentCall]], Coroutine[Any, Any, Any]], **agent: Any
) -> Any:
    """Runs `work` beside a service, with the program and the call of a sample; then nothing of a sandbox is left."""
    settings = AgentSettings(**{"harbor": {"tasks": str(TASKS)}, "command": COMMAND} | agent)
    assert settings.harbor is not None
    with (
        chat_server(lambda *_: Answer(body={})) as server,
        closing(LocalProvider()) as provider,
        patch.object(harbor_program, "open_provider", lambda *_: provider),
    ):
        program = HarborProgram(settings, settings.harbor)
        session = {"base_url": f"{server.url}/sessions/s", "api_key": "key"}
        result = asyncio.run(work(program, lambda sample: AgentCall(**session, sample=sample)))
    assert list(processes_with(KILLED["sandbox"])) == []
    return result


def played(sample: dict[str, Any], **agent: Any) -> tuple[dict[str, float], dict[str, float]]:
    """The reward and the metrics of one rollout."""

    async def run(program: HarborProgram, call: Callable[[dict[str, Any]], AgentCall]) -> Any:
        report = RunNotes()
        return await program.run(call(sample), report), report.metrics

    reward, metrics = with_program(run, **agent)
    return reward, metrics


def task_with(folder: Path, test: str = "echo 1 > /logs/verifier/reward.txt", toml: str = "", docker: str = "") -> str:
    """A folder of one task, named `t`."""
    toml += "" if "[verifier]" in toml else "\n[verifier]\ntimeout_sec = 60.0\n"
    for path, text in {
        "task.toml": toml,
        "instruction.md": "Do it.",
        "environment/Dockerfile": f"FROM debian\n{docker}",
        "tests/test.sh": f"#!/bin/bash\n{test}\n",
    }.items():
        (folder / "t" / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / "t" / path).write_text(text)
    return str(folder)


def sample(script: str = "true", **info: Any) -> dict[str, Any]:
    return {"messages": [], "extra_env_info": {"task": "t", "script": script, **info}}


@pytest.mark.parametrize("number", range(6))
def test_the_verifier_of_each_example_rewards_a_solution_and_nothing_else(number: int) -> None:
    reward, metrics = played(sample_of(number))
    assert reward == {"reward": reward_of(number)}
    if number == len(NAMES) + NAMES.index("fix-median"):
        assert metrics["verifier_passed"] == 4.0, "further numbers of a verifier are metrics"
    assert {"sandbox_create_s", "agent_run_s", "verifier_s", "sandbox_destroy_s"} <= metrics.keys()
    assert {"agent_failed", "agent_processes_ended"}.isdisjoint(metrics)


def test_a_command_in_a_sandbox_gets_integers_of_any_size(tmp_path: Path) -> None:
    script = 'grep -o "\\"big\\":[0-9]*" /run/rollout/sample.json | cut -d: -f2 > /root/big'
    tasks = task_with(tmp_path, "[ $(cat /root/big) = 18446744073709551616 ] && echo 1 > /logs/verifier/reward.txt")
    assert played(sample(script, big=2**64), harbor={"tasks": tasks})[0] == {"reward": 1.0}


def test_a_function_gets_the_sandbox_as_its_fourth_argument() -> None:
    agent = {"command": None, "import_path": f"{__name__}:solves"}
    assert played(sample_of(3), **agent)[0] == {"reward": 1.0}
    settings = AgentSettings.model_validate({**agent, "harbor": {"tasks": str(TASKS)}})
    assert AgentRunsOfTask(settings).max_concurrent_steps == 32, "16 at work, and as many whose sandboxes are made"


async def solves(_base_url: str, _api_key: str, sample: SampleInput, sandbox: RunningSandbox) -> None:
    done = await sandbox.exec(["bash", "-c", str((sample.extra_env_info or {})["script"])])
    assert done.exit_code == 0, done


def test_an_agent_that_fails_or_is_too_slow_is_judged_by_what_it_has_left(tmp_path: Path) -> None:
    test = "cat /root/left > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt"
    # On a busy machine it may take the agent long to leave something.
    for limit_s in (1.0, 4.0, 16.0, 64.0):
        short = task_with(tmp_path / f"{limit_s}", test, f"[agent]\ntimeout_sec = {limit_s}")
        slow, metrics = played(sample("echo 0.5 > /root/left; sleep 600"), harbor={"tasks": short})
        if slow != {"reward": 0.0}:
            break
    assert (slow, metrics["agent_timed_out"]) == ({"reward": 0.5}, 1.0)
    tasks = task_with(tmp_path / "unlimited", test)
    broken, metrics = played(sample("echo 0.25 > /root/left; exit 3"), harbor={"tasks": tasks})
    assert (broken, metrics["agent_failed"]) == ({"reward": 0.25}, 1.0)


@pytest.mark.parametrize(
    ("test", "toml", "message"),
    [
        ("true", "", "wrote neither"),
        ("exit 2", "", "ended with exit code 2 and wrote neither"),
        ("echo nothing at all", "", "It printed last: nothing at all"),
        (": > /logs/verifier/reward.txt", "", r"verifier gave no reward: .*reward\.txt must hold a finite number"),
        ("mkdir /logs/verifier/reward.json", "", r"The verifier gave no reward: .*reward\.json cannot be read"),
        ("seq 10000000", "", r"\n9999999\n10000000$"),
        ("sleep 60", "[verifier]\ntimeout_sec = 0.5", "was ended after 0.5 s, its timeout_sec"),
    ],
)
def test_a_verifier_without_a_reward_is_a_failure_no_zero(tmp_path: Path, test: str, toml: str, message: str) -> None:
    """Also where the agent has written one."""
    forged = "echo 1 > /logs/verifier/reward.txt"
    with pytest.raises(VerifierFailed, match=message) as failed:
        played(sample(forged), harbor={"tasks": task_with(tmp_path, test, toml)})
    assert failed.value.retryable is False


@pytest.mark.parametrize("start", ["nohup sh -c {} &", "setsid sh -c {} &", "(setsid sh -c {} &)"])
def test_what_an_agent_has_left_running_does_not_meet_the_verifier(tmp_path: Path, start: str) -> None:
    spies = (
        "while :; do cat /proc/[0-9]*/environ | grep -aq JUDGE_KEY && echo 0.5 > /root/stolen; "
        'test -d /tests && echo "{\\"reward\\": 1}" > /logs/verifier/reward.json; done'
    )
    test = "sleep 0.5; cat /root/stolen > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt"
    tasks = task_with(tmp_path, test, '[verifier.env]\nJUDGE_KEY = "secret"')
    script = start.format(f"{shlex.quote(spies)} > /dev/null 2>&1 < /dev/null")
    reward, metrics = played(sample(script), harbor={"tasks": tasks})
    assert reward == {"reward": 0.0}
    assert metrics["agent_processes_ended"] >= 1.0


def test_where_processes_cannot_be_ended_no_verifier_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftover, "END", "echo '17 (left)'")
    monkeypatch.setattr(leftover, "TRY_EVERY_S", 0.0)
    with pytest.raises(
        VerifierFailed, match=r"t was not judged\. Processes of the sandbox cannot be ended: 17 \(left\)"
    ):
        played(sample(), harbor={"tasks": task_with(tmp_path)})


def test_a_verifier_gets_its_variables_and_the_environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_HOST", "0.5")
    toml = '[verifier.env]\nA = "${OF_HOST}"\n[environment.env]\nB = "${NOWHERE:-0.25}"'
    tasks = task_with(tmp_path, 'python3 -c "print($A + $B)" > /logs/verifier/reward.txt', toml)
    assert played(sample(), harbor={"tasks": tasks, "passed_variables": ["OF_HOST"]})[0] == {"reward": 0.75}


@pytest.mark.parametrize("kind", ["sandbox", "agent", "verifier"])
def test_what_is_killed_is_a_failure_of_the_fleet(tmp_path: Path, kind: str) -> None:
    tasks = task_with(tmp_path, "sleep 60")

    async def run(program: HarborProgram, call: Callable[[dict[str, Any]], AgentCall]) -> None:
        works_s = 0 if kind == "verifier" else 60
        playing = asyncio.ensure_future(program.run(call(sample(works_s=works_s)), RunNotes()))
        draw = random.Random(0)
        # Before it, the sandbox that is struck may be the one in which the image was built.
        while works_s and not list(processes_with(KILLED["agent"])):
            assert not playing.done(), playing
            await asyncio.sleep(0.02)
        while not strike("(/tests/test.sh)" if kind == "verifier" else KILLED[kind], draw):
            assert not playing.done(), playing
            await asyncio.sleep(0.02)
        await playing

    with pytest.raises(EnvironmentLost) as failed:
        with_program(run, harbor={"tasks": tasks})
    assert failed.value.retryable is True


def test_a_run_that_is_cancelled_leaves_nothing(tmp_path: Path) -> None:
    async def run(program: HarborProgram, call: Callable[[dict[str, Any]], AgentCall]) -> None:
        playing = asyncio.ensure_future(program.run(call(sample(works_s=60)), RunNotes()))
        while not list(processes_with(KILLED["agent"])):
            await asyncio.sleep(0.02)
        await virtual_time.end_by_cancellation(playing)
        assert list(processes_with(KILLED["sandbox"])) == []

    with_program(run, harbor={"tasks": task_with(tmp_path)})


def test_more_memory_than_the_task_has_is_a_failure_of_the_agent(tmp_path: Path) -> None:
    tasks = task_with(tmp_path, toml="[environment]\nmemory_mb = 64")
    with pytest.raises(AgentFailed, match="more than its memory of 64 MiB"):
        played(sample("python3 -c 'x = b\"1\" * 2**28; import time; time.sleep(60)'"), harbor={"tasks": tasks})


def test_a_task_that_the_provider_cannot_make_is_refused(tmp_path: Path) -> None:
    tasks = task_with(tmp_path, docker="RUN touch /usr/bin/mine")
    with pytest.raises(EnvironmentRejected, match=r"line 2 of the Dockerfile, `RUN touch /usr/bin/mine`.*Read-only"):
        played(sample(), harbor={"tasks": tasks})
    with pytest.raises(EnvironmentRejected, match="must name one of the 1 tasks, got 'other'"):
        played({"messages": [], "extra_env_info": {"task": "other"}}, harbor={"tasks": tasks})


async def playing_at_once(count: int, places: int, limit_s: float = 60.0) -> list[tuple[float, float, float]]:
    """When each rollout opened its sandbox, was at work, and ended. To open one takes 4 s, and so does the work."""
    loop, times, numbers = asyncio.get_running_loop(), [[0.0, 0.0, 0.0] for _ in range(count)], itertools.count()

    class Slow(LocalProvider):
        def __init__(self) -> None: ...

        async def open(self, spec: SandboxSpec) -> Any:
            number = next(numbers)
            times[number][0] = loop.time()
            await asyncio.sleep(4.0)
            return AsyncMock(number=number)

        def close(self) -> None: ...

    async def works(program: HarborProgram, call: Any, task: Any, sandbox: Any, said: RunNotes) -> None:  # noqa: ARG001
        times[sandbox.number][1] = loop.time()
        await asyncio.sleep(4.0)
        times[sandbox.number][2] = loop.time()

    harbor = {"tasks": str(TASKS)}
    settings = {"harbor": harbor, "command": COMMAND, "max_concurrent_runs": places, "timeout_s": limit_s}
    with (
        patch.object(harbor_program, "open_provider", lambda *_: Slow()),
        patch.object(harbor_program, "prepare", AsyncMock(return_value=frozenset())),
        patch.object(harbor_program, "judge", AsyncMock(return_value=({"reward": 1.0}, 0))),
        patch.object(harbor_program, "tasks_within", lambda harbor, _: tasks_within(harbor, 1e9)),
        patch.object(HarborProgram, "_agent", works),
    ):
        task = AgentRunsOfTask(AgentSettings.model_validate(settings))
        steps = asyncio.Semaphore(task.max_concurrent_steps or count)

        async def run(number: int) -> None:
            async with steps:
                call = AgentCall(base_url="http://127.0.0.1", api_key="", sample=sample_of(number))
                await task.step([], call)

        await asyncio.gather(*map(run, range(count)))
    return [(opened, begun, ended) for opened, begun, ended in times]


@virtual_time.synchronous
async def test_sandboxes_are_made_while_their_rollouts_wait_for_a_place() -> None:
    times = await playing_at_once(32, places=4)
    begun, ends = sorted(begun for _, begun, _ in times), sorted(ended for _, _, ended in times)
    assert begun == [4.0 + 4.0 * (number // 4) for number in range(32)]
    # Of those that get the place of another one, none waits for its sandbox.
    assert [first - end for first, end in zip(begun[4:], ends, strict=False)] == [0.0] * 28
    at_once = max(sum(opened <= now < ended for opened, _, ended in times) for now, _, _ in times)
    assert at_once == 8


@virtual_time.synchronous
async def test_the_wait_for_a_place_is_no_time_of_the_run_and_the_sandboxs_start_is() -> None:
    assert len(await playing_at_once(8, places=1, limit_s=8.5)) == 8
    with pytest.raises(AgentFailed, match=r"ended after 7.5 s, its timeout_s"):
        await playing_at_once(1, places=1, limit_s=7.5)
    with pytest.raises(AgentFailed, match=r"ended after 3.5 s, its timeout_s"):
        await playing_at_once(1, places=1, limit_s=3.5)
