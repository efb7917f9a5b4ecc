"""The math environment: what counts as right, and that no answer can hang it or outlive it."""

import asyncio
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.environments.math import MathEnvironment, MathInfo, ground_truth_text, last_box
from deployments.failures import EnvironmentLost
from rollout_env import ChatMessage, SampleRejected, StepOutcome, check
from rollout_env.step_watch import longest_block

HOSTILE = "\\boxed{10^{10^{10^{10}}}}"


def conversation(response: str) -> list[ChatMessage]:
    return [{"role": "user", "content": "What is 17 + 25?"}, {"role": "assistant", "content": response}]


@pytest.fixture(scope="module")
def environment() -> Iterator[MathEnvironment]:
    environment = MathEnvironment(check_timeout_s=1.0)
    yield environment
    environment.close()


def judge(environment: MathEnvironment, response: str, ground_truth: str | int | float = "42") -> StepOutcome:
    return asyncio.run(environment.step(conversation(response), MathInfo(ground_truth=ground_truth)))


def worker_of(environment: MathEnvironment) -> psutil.Process:
    """The process that does the checks, known to run because it has just done one."""
    judge(environment, "42")
    (pid,) = environment.pool._pool_manager.worker_manager.workers
    return psutil.Process(pid)


def wait_until(condition: Callable[[], bool], limit_s: float = 10.0) -> bool:
    end = time.monotonic() + limit_s
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_right_answer_has_reward_one_and_ends_the_rollout(environment: MathEnvironment) -> None:
    assert judge(environment, "So it is \\boxed{42}.") == StepOutcome(
        observation={"role": "user", "content": "Environment: correct"}, reward=1.0, terminated=True, answer="42"
    )


def test_a_wrong_answer_has_reward_zero_and_the_right_one_is_told(environment: MathEnvironment) -> None:
    assert judge(environment, "\\boxed{41}") == StepOutcome(
        observation={"role": "user", "content": "Environment: incorrect. Expected 42."},
        reward=0.0,
        terminated=True,
        answer="41",
    )


@pytest.mark.parametrize(
    ("response", "ground_truth", "answer"),
    [
        ("The answer is 42.", "42", "42"),
        ("\\boxed{ 42 }", 42, " 42 "),
        ("\\boxed{\\frac{1}{2}}", "0.5", "\\frac{1}{2}"),
        ("\\boxed{0.5}", "\\frac{2}{4}", "0.5"),
        ("\\boxed{1,000}", 1000, "1,000"),
        ("\\boxed{0.0000001}", 1e-07, "0.0000001"),
        ("\\boxed{7}, no, \\boxed{42}", "42", "42"),
        ("\\boxed{\\{1, 2\\}}", "\\{2, 1\\}", "\\{1, 2\\}"),
    ],
)
def test_an_equal_answer_is_right(
    environment: MathEnvironment, response: str, ground_truth: str | float, answer: str
) -> None:
    outcome = judge(environment, response, ground_truth)
    assert (outcome.reward, outcome.answer) == (1.0, answer)


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("", None),
        ("I do not know.", None),
        ("\\boxed{}", ""),
        ("\\boxed{42} or rather \\boxed{43}", "43"),
        ("42 it is: \\boxed{43}", "43"),
    ],
)
def test_a_response_that_ends_in_no_right_answer_is_wrong(
    environment: MathEnvironment, response: str, answer: str | None
) -> None:
    outcome = judge(environment, response)
    assert (outcome.reward, outcome.answer) == (0.0, answer)


@pytest.mark.parametrize("ground_truth", ["", "  ", "}{", "\\frac{"])
def test_a_ground_truth_that_cannot_be_read_rejects_the_sample(environment: MathEnvironment, ground_truth: str) -> None:
    with pytest.raises(SampleRejected) as refusal:
        judge(environment, "\\boxed{42}", ground_truth)
    assert str(refusal.value) == f"extra_env_info.ground_truth is no mathematical expression: {ground_truth!r}"


def test_an_answer_that_takes_forever_is_given_up_and_the_next_one_checked(environment: MathEnvironment) -> None:
    assert judge(environment, HOSTILE) == StepOutcome(
        observation={"role": "user", "content": "Environment: not checked. The check took longer than 1 s."},
        reward=0.0,
        terminated=True,
        answer="10^{10^{10^{10}}}",
    )
    assert judge(environment, "\\boxed{42}").reward == 1.0


def test_the_event_loop_runs_on_while_an_answer_is_checked(environment: MathEnvironment) -> None:
    step = environment.step(conversation(HOSTILE), MathInfo(ground_truth=42))
    outcome, longest_block_s = asyncio.run(longest_block(step, timeout_s=60))
    assert outcome.observation["content"] == "Environment: not checked. The check took longer than 1 s."
    assert longest_block_s < 0.9


def test_a_worker_that_dies_between_checks_is_replaced(environment: MathEnvironment) -> None:
    worker_of(environment).kill()
    with pytest.raises(EnvironmentLost):
        judge(environment, "42")
    assert judge(environment, "42").reward == 1.0


def test_closing_ends_the_worker() -> None:
    environment = MathEnvironment()
    worker = worker_of(environment)
    environment.close()
    assert is_gone(worker.pid)


@pytest.mark.slow
@pytest.mark.parametrize("response", ["\\boxed{42}", HOSTILE], ids=["idle", "busy"])
def test_the_worker_ends_when_its_parent_is_killed(response: str, tmp_path: Path) -> None:
    program = f"""
        import asyncio
        from deployments.environments.math import MathEnvironment, MathInfo

        async def main():
            environment = MathEnvironment(check_timeout_s=1.0)
            log = [{{"role": "assistant", "content": {response!r}}}]
            await environment.step([{{"role": "assistant", "content": "1"}}], MathInfo(ground_truth=1))
            workers = environment.pool._pool_manager.worker_manager.workers
            asyncio.get_running_loop().call_later(0.3, lambda: print(*workers, flush=True))
            await environment.step(log, MathInfo(ground_truth=42))
            await asyncio.sleep(60)

        if __name__ == "__main__":
            asyncio.run(main())
    """
    script = tmp_path / "parent.py"
    script.write_text(textwrap.dedent(program))
    same_imports = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(script)]
    with subprocess.Popen(command, cwd=tmp_path, env=same_imports, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        assert not is_gone(worker)
        parent.kill()
    assert wait_until(lambda: is_gone(worker))


@given(st.text(alphabet="abc {}\\1", max_size=30), st.text(alphabet="ab1+ ", max_size=10))
def test_a_box_at_the_end_is_the_last_box(before: str, content: str) -> None:
    assert last_box(before.rstrip("\\") + "\\boxed{" + content + "}") == content


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("no box", None),
        ("\\boxed{1", None),
        ("\\boxed{1} and \\boxed{2", "1"),
        ("\\boxed{\\boxed{3}}", "3"),
        ("\\boxed {\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{\\}}", "\\}"),
    ],
)
def test_the_last_box_is_the_last_whose_braces_close(text: str, content: str | None) -> None:
    assert last_box(text) == content


@pytest.mark.timeout(30)
def test_finding_the_last_box_takes_linear_time() -> None:
    # In quadratic time this would take longer than the test may.
    assert last_box("\\boxed{" * 200_000) is None


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_float_is_written_without_exponent_and_loses_nothing(value: float) -> None:
    text = ground_truth_text(value)
    assert "e" not in text.lower()
    assert float(text) == value


def test_it_keeps_the_rules_for_environments() -> None:
    check(MathEnvironment, samples=2)


def test_the_examples_are_different_additions(environment: MathEnvironment) -> None:
    samples = environment.example_samples(200, seed=1)
    assert samples == environment.example_samples(200, seed=1)
    assert len({sample["messages"][0]["content"] for sample in samples}) == 200
    for sample in samples:
        (message,) = sample["messages"]
        left, right = message["content"].removeprefix("What is ").removesuffix("?").split(" + ")
        assert message == {"role": "user", "content": f"What is {left} + {right}?"}
        assert 0 <= int(left) <= 99
        assert 0 <= int(right) <= 99
        assert sample["extra_env_info"] == {"ground_truth": str(int(left) + int(right))}
