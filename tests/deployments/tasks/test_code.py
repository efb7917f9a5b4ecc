"""The task `code` with a sandbox of this machine: what is rewarded, what the model is told."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from deployments.sandbox import Limits, Outcome, SandboxLost
from deployments.sandbox.interface import MIB
from deployments.tasks.code import CodeEnvironment, CodeInfo, SandboxSettings, _reported
from rollout_env import StepOutcome, TemporaryFailure, check
from tests.fakes.sandbox import ScriptedSandbox, printed, scripted

ADD = "```python\ndef add(a, b):\n    return a + b\n```"


@pytest.fixture(scope="module")
def environment() -> Iterator[CodeEnvironment]:
    environment = CodeEnvironment("share", SandboxSettings(processor_time_limit_s=0.5, max_concurrent_runs=2))
    yield environment
    environment.close()


def step(environment: CodeEnvironment, reply: str, **info: Any) -> StepOutcome:
    message_log: list[Any] = [{"role": "user", "content": "?"}, {"role": "assistant", "content": reply}]
    return asyncio.run(environment.step(message_log, CodeInfo.model_validate(info)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("test", "reward"),
    [
        ({"call": "add(1, 2)", "expected": 3}, 1.0),
        ({"call": "add(1, 2)", "expected": 4}, 0.0),
        ({"call": "add(0.1, 0.2)", "expected": 0.3}, 1.0),
        ({"call": "(add(1, 2), [])", "expected": [3, []]}, 1.0),
        ({"call": "add(1, 0) == 1", "expected": 1}, 0.0),
        ({"call": "add(1)", "expected": 3}, 0.0),
        ({"call": "add(BASE, 1)", "expected": 42}, 1.0),
        ({"call": "{'a': (1, None), 'b': [True, 'ü\\n\"']}", "expected": {"a": [1, None], "b": [True, 'ü\n"']}}, 1.0),
        ({"call": "{1: 2.5e300}", "expected": {"1": 2.5e300}}, 1.0),
        ({"call": "float('inf')", "expected": 1.0}, 0.0),
        ({"call": "{1, 2}", "expected": [1, 2]}, 0.0),
        ({"code": "assert add(1, 2) == 3"}, 1.0),
        ({"code": "assert add(1, 2) == 4"}, 0.0),
    ],
)
def test_a_function_is_rewarded_by_what_it_gives(environment: CodeEnvironment, test: Any, reward: float) -> None:
    outcome = step(environment, ADD, setup="BASE = 41", tests=[test])
    assert (outcome.reward, outcome.terminated, outcome.answer) == (reward, True, "def add(a, b):\n    return a + b\n")


@pytest.mark.slow
def test_a_program_is_rewarded_by_what_it_prints(environment: CodeEnvironment) -> None:
    tests = [{"stdin": "2 3\n", "stdout": "5"}, {"stdin": "1 1", "stdout": "2 \n"}, {"stdin": "1 1", "stdout": "3"}]
    outcome = step(environment, "```\nprint(sum(map(int, input().split())))\n```", tests=tests)
    assert outcome.reward == pytest.approx(2 / 3)
    assert outcome.observations[0]["content"] == (
        "Environment: 2 of 3 tests passed. The program printed '2\\n', expected '3'."
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("at_two", "reward", "told"),
    [
        ("while True: pass", 0.25, "1 of 4 tests passed. The program used too much processor time."),
        ("import os; os._exit(0)", 0.75, "3 of 4 tests passed. f(2) failed: its process ended before it did."),
    ],
)
def test_a_test_that_hangs_costs_those_behind_it_one_that_exits_not(
    environment: CodeEnvironment, at_two: str, reward: float, told: str
) -> None:
    code = f"```python\ndef f(x):\n    if x == 2:\n        {at_two}\n    return x\n```"
    outcome = step(environment, code, tests=[{"call": f"f({x})", "expected": x} for x in range(1, 5)])
    assert (outcome.reward, outcome.observations[0]["content"]) == (reward, f"Environment: {told}")


@pytest.mark.slow
@pytest.mark.parametrize(
    "cheat",
    [
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "print('x 0 {\"value\": 3}', flush=True)",
        "import os; os.write(1, b'0 {\"value\": 3}\\n')",
        "import os, signal; os.kill(os.getppid(), signal.SIGKILL)",
        "class Equal:\n    def __eq__(self, other): return True\ndef add(a, b): return Equal()",
    ],
)
def test_a_program_that_computes_nothing_passes_no_test(environment: CodeEnvironment, cheat: str) -> None:
    outcome = step(environment, f"```python\n{cheat}\n```", tests=[{"call": "add(1, 2)", "expected": 3}])
    assert (outcome.reward, outcome.terminated) == (0.0, True)


@pytest.mark.slow
def test_it_keeps_the_rules_for_environments() -> None:
    check(
        lambda: CodeEnvironment(sandbox=SandboxSettings(max_concurrent_runs=1)),
        replies=["```python\ndef f(x): return x\n```", "no code"],
        samples=1,
        max_block_s=10.0,
    )


@pytest.mark.parametrize("reply", ["I do not know.", f"<think>\n{ADD}\n</think>\nDone."])
def test_a_reply_without_code_is_worth_nothing_and_runs_nothing(reply: str) -> None:
    sandbox = ScriptedSandbox([])
    outcome = step(CodeEnvironment(sandbox=scripted(sandbox)), reply, tests=[{"stdout": "1"}])
    assert (outcome.reward, outcome.terminated, outcome.answer) == (0.0, True, None)
    assert outcome.observations[0]["content"] == "Environment: the reply has no code block."
    assert sandbox.runs == []


@pytest.mark.parametrize(
    ("before", "after"),
    [("", "\nThis prints:\n```\n5\n```"), ("<think>```python\nwrong\n```</think>\n", ""), ("Hm.</think>", "")],
)
def test_the_program_is_neither_in_the_thought_nor_the_block_of_its_output(before: str, after: str) -> None:
    sandbox = ScriptedSandbox([printed("5\n")])
    reply = f"{before}```python\nprint(5)\n```{after}"
    outcome = step(CodeEnvironment(sandbox=scripted(sandbox)), reply, tests=[{"stdout": "5"}])
    assert (outcome.reward, outcome.answer, sandbox.runs[0][0].source) == (1.0, "print(5)\n", "print(5)\n")


def test_all_tests_must_pass_and_none_is_run_after_one_that_failed() -> None:
    sandbox = ScriptedSandbox([printed("1\n"), printed("wrong\n")])
    tests = [{"stdout": "1"}, {"stdout": "2"}, {"stdout": "3"}]
    outcome = step(CodeEnvironment(sandbox=scripted(sandbox)), "```\nprint(1)\n```", tests=tests)
    assert (outcome.reward, len(sandbox.runs)) == (0.0, 2)
    assert outcome.observations[0]["content"] == (
        "Environment: 1 of 3 tests passed. The program printed 'wrong\\n', expected '2'."
    )


@pytest.mark.parametrize(
    ("outcome", "problem"),
    [
        (Outcome("time", None, "", "", 1.0), "The program took too long."),
        (Outcome("memory", None, "", "", 1.0), "The program used too much memory."),
        (Outcome("output", None, "", "", 1.0), "The program printed too much."),
        (printed("", 1, "Traceback\nKeyError: 'x'\n"), "The program failed: KeyError: 'x'"),
        (printed("1\n", 139), "The program failed: it wrote no error."),
    ],
)
def test_a_program_that_fails_is_wrong(outcome: Outcome, problem: str) -> None:
    environment = CodeEnvironment(sandbox=scripted(ScriptedSandbox([outcome])))
    judged = step(environment, "```\nprint(1)\n```", tests=[{"stdout": "1"}])
    assert judged.reward == 0.0
    assert judged.observations[0]["content"] == f"Environment: 0 of 1 tests passed. {problem}"


def test_a_sandbox_that_fails_is_a_lost_step_which_is_tried_again() -> None:
    environment = CodeEnvironment(sandbox=scripted(ScriptedSandbox([SandboxLost("It broke.")])))
    with pytest.raises(TemporaryFailure, match=r"The sandbox failed: It broke\."):
        step(environment, "```\n1\n```", tests=[{"stdout": "1"}])


def test_the_limits_of_the_config_reach_the_sandbox() -> None:
    sandbox = ScriptedSandbox([printed("1")])
    limits: Any = {"time_limit_s": 7.0, "processor_time_limit_s": 3.0, "memory_limit_mib": 100, "max_processes": 9}
    environment = CodeEnvironment(sandbox=scripted(sandbox, max_concurrent_runs=5, **limits))
    step(environment, "```\n1\n```", tests=[{"stdout": "1"}])
    assert sandbox.runs[0][2] == Limits(time_s=7.0, processor_time_s=3.0, memory_bytes=100 * MIB, processes=9)
    assert environment.max_concurrent_steps == 5
    environment.close()
    assert sandbox.is_closed


def test_only_lines_with_the_token_are_results_and_the_first_one_counts() -> None:
    stdout = 't 0 {"value": 1}\nother 1 {"value": 2}\nt 1 {"value": 3}\nt 1 {"value": 4}\nt x {}\nt 2 [\nt 3 5\n'
    assert _reported(stdout, "t") == {0: {"value": 1}, 1: {"value": 3}}
