"""An environment in a process of its own, over HTTP."""

import asyncio
import sys
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from deployments.environments.step_runner import StepRunner
from deployments.failures import EnvironmentLost, RolloutFailure
from deployments.protocols.environments import StepRequest
from deployments.tasks.bridges.hosted import (
    HostedEnvironment,
    HostedEnvironmentError,
    HostNotStarted,
    _HostAddress,
    _HostSettings,
    _variables_of,
)
from rollout_env import OutcomeInvalid, SampleRejected, StepOutcome, TemporaryFailure, check, play
from rollout_env.environment import forks_sessions
from rollout_env.steps import validated_extra_env_info

MODULE = "tests.deployments.tasks.bridges.hosted_environments"
PROMPT = [{"role": "user", "content": "Q"}]

pytestmark = [pytest.mark.slow, pytest.mark.true_clock]


def hosted(class_name: str = "TallyEnvironment", **arguments: Any) -> HostedEnvironment:
    return HostedEnvironment(
        _HostSettings(python=sys.executable, import_path=f"{MODULE}:{class_name}", arguments=arguments)
    )


@pytest.fixture(scope="module")
def tally() -> Iterator[HostedEnvironment]:
    environment = hosted(greeting="Begin.")
    yield environment
    asyncio.run(environment.close())


def sample(until: int = 2) -> dict[str, Any]:
    return {"extra_env_info": {"until": until}}


def test_a_rollout_is_played_in_the_other_process(tally: HostedEnvironment) -> None:
    done = play(tally, ["who?", "b", "c"], sample())
    begun, asked, process, *rest = [message["content"] for message in done.message_log]
    assert (begun, asked, rest) == ("Begin.", "who?", ["b", "2"])
    assert psutil.Process(int(process)).ppid() == psutil.Process().pid
    assert (done.rewards, done.terminated, done.extra_env_info) == ({"tally": 2.0}, True, {"until": 2, "count": 2})


def test_observations_come_over_also_as_images_and_where_there_is_none(tally: HostedEnvironment) -> None:
    played = play(tally, ["silent"], sample())
    assert (played.terminated, played.message_log[-1]["role"]) == (True, "assistant")
    [turn] = play(tally, ["paint"], sample()).turns
    assert turn.outcome.observation == {"role": "user", "content": "", "images": [b"\x89PNG"]}


def test_what_it_is_comes_from_the_hosted_environment(tally: HostedEnvironment) -> None:
    assert tally.description == "Tallies."
    assert tally.tools == [{"type": "function", "function": {"name": "tally"}}]
    assert tally.ExtraEnvInfo.model_json_schema()["properties"]["until"]["minimum"] == 1
    assert tally.lost_session == "reopen"
    assert tally.example_samples(2, seed=5) == [sample(6), sample(7)]


@pytest.mark.parametrize("wrong", [{}, {"until": 0}, {"until": "two"}])
def test_fields_are_checked_without_the_host(tally: HostedEnvironment, wrong: dict[str, Any]) -> None:
    with pytest.raises(SampleRejected, match=r"The environment cannot take this sample: .*until"):
        validated_extra_env_info(tally, wrong)


@pytest.mark.parametrize(
    ("reply", "error", "message"),
    [
        ("reject", SampleRejected, "There is no such tally."),
        ("lose", TemporaryFailure, "The ink is out."),
        ("nan", OutcomeInvalid, "Input should be a finite number"),
        ("raise", HostedEnvironmentError, "KeyError: 'tally'"),
    ],
)
def test_what_it_raises_comes_here(tally: HostedEnvironment, reply: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as raised:
        play(tally, [reply], sample())
    if error is HostedEnvironmentError:
        assert 'raise KeyError("tally")' in raised.value.__notes__[0]


def test_sessions_are_held_by_the_host() -> None:
    environment = hosted("MemoryEnvironment")
    assert (environment.max_sessions, environment.lost_session) == (7, "fail")
    assert not forks_sessions(environment)
    for _ in range(2):
        played = play(environment, ["a", "b", "c"], sample(3))
        assert [message["content"] for message in played.message_log[2::2]] == ["1", "2", "3"]
    check(environment, samples=2, max_block_s=30)


async def test_sessions_are_forked_where_the_hosted_environment_forks_them() -> None:
    environment = hosted("ForkedMemoryEnvironment")
    assert forks_sessions(environment)
    turns: Any = [*PROMPT, {"role": "assistant", "content": "a"}, {"role": "user", "content": "1"}]
    log = [*turns, {"role": "assistant", "content": "b"}]

    runner = StepRunner(environment, "tally", None)
    step = StepRequest(log, {"until": 3}, step_id="f", session_id="f", turn=1, first_turn=1)
    outcome = await runner.start(step, set())
    assert isinstance(outcome, StepOutcome)
    assert outcome.observations[0]["content"] == "2"
    await runner.close()
    await environment.close()


def children() -> set[psutil.Process]:
    """Of this process; those that other tests have left may end at any moment."""
    return set(psutil.Process().children())


async def test_a_host_that_dies_loses_the_step_and_is_started_again() -> None:
    before = children()
    environment = hosted()

    runner = StepRunner(environment, "tally", None)

    def step(reply: str, rollout: str) -> StepRequest:
        log: Any = [*PROMPT, {"role": "assistant", "content": reply}]
        return StepRequest(log, {"until": 2}, step_id=rollout, session_id=rollout)

    lost, beside = await asyncio.gather(*(runner.start(step(reply, reply), set()) for reply in ("die", "wait")))
    assert isinstance(lost, EnvironmentLost)
    assert isinstance(beside, EnvironmentLost)
    again = await runner.start(step("a", "again"), set())
    assert not isinstance(again, RolloutFailure)
    await runner.close()
    await environment.close()
    assert children() <= before


async def test_the_next_request_starts_a_host_that_has_died_and_only_one() -> None:
    before = children()
    environment = hosted()

    [child] = children() - before
    child.kill()
    child.wait(60)
    info = environment.ExtraEnvInfo(until=2)
    begun = await asyncio.gather(*(environment.start([], info) for _ in range(4)))
    assert [each.observation for each in begun] == [[{"role": "user", "content": "Go."}]] * 4
    assert len(children() - before) == 1
    await environment.close()
    assert children() <= before


def test_a_host_that_does_not_start_is_named() -> None:
    with pytest.raises(HostNotStarted, match=r"cannot be started: .*No such file"):
        HostedEnvironment(_HostSettings(python="/no/python", import_path="a:B"))
    with pytest.raises(HostNotStarted, match="The host of no_module:Nothing ended with exit code 1"):
        HostedEnvironment(_HostSettings(python=sys.executable, import_path="no_module:Nothing"))
    slow = _HostSettings(python=sys.executable, import_path=f"{MODULE}:TallyEnvironment")
    with pytest.raises(HostNotStarted, match="did not answer within 0 s"):
        HostedEnvironment(slow, start_timeout_s=0.0)
    with pytest.raises(ValueError, match="give either host or url"):
        HostedEnvironment()


def test_a_host_has_few_variables_and_those_that_its_settings_name() -> None:
    own = {"PATH": "/bin", "HOME": "/root", "API_KEY": "secret", "HF_HOME": "/models"}
    made = _HostSettings(python="python", import_path="a:B", variables={"MODE": "fast"}, passed_variables=["HF_HOME"])
    assert _variables_of(made, own) == {"PATH": "/bin", "HOME": "/root", "HF_HOME": "/models", "MODE": "fast"}
    assert _variables_of(made, {}) == {"MODE": "fast"}


def test_only_a_host_on_another_machine_is_reached_through_a_proxy() -> None:
    addresses = {("http://127.0.0.1:8100",): False, ("http://host", "/tmp/s"): False, ("http://far.example",): True}
    for each, trusts in addresses.items():
        address = _HostAddress(*each)
        assert (address.client(1.0).trust_env, address.async_client().trust_env) == (trusts, trusts), each
