"""The bridge to reasoning-gym, over the real package: every task with its own oracle answer."""

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import reasoning_gym
from reasoning_gym.factory import DATASETS

from deployments.tasks.bridges.reasoning_gym import (
    ReasoningGymEnvironment,
    _dataset_of,
    _entry_of,
    _refuse_unknown_names,
)
from rollout_env import PlayResult, SampleRejected, TemporaryFailure, check, play

SEED = 3
TASKS = sorted(set(DATASETS) - {"composite"})
ORACLE_IN_METADATA = {"propositional_logic": "example_answer", "rubiks_cube": "example_correct_answer"}
"""Tasks with many right answers, of which the library names one."""
WITHOUT_ORACLE = {"boxnet", "graph_color", "rush_hour"}
"""Tasks for which the library names no answer that its verifier takes. `graph_color` names a colouring, not a text."""


@pytest.fixture(scope="module")
def gym() -> Iterator[ReasoningGymEnvironment]:
    environment = ReasoningGymEnvironment(workers=1, processor_time_limit_s=30)
    yield environment
    environment.close()


def sample_of(task: str, **fields: Any) -> dict[str, Any]:
    return {"extra_env_info": {"task": task, "seed": SEED, **fields}}


def answered(gym: ReasoningGymEnvironment, answer: str, task: str, **fields: Any) -> PlayResult:
    return play(gym, [f"I think it is <answer>{answer}</answer>"], sample_of(task, **fields))


def made(gym: ReasoningGymEnvironment, task: str, level: int | None = None) -> Any:
    """The puzzle as a worker makes it: hashes of texts differ between this process and the workers."""
    return asyncio.run(gym.pool.run(60, _entry_of, task, SEED, level, "{}"))


def oracle_of(gym: ReasoningGymEnvironment, task: str, level: int | None = None) -> str:
    entry = made(gym, task, level)
    oracle: str = entry["metadata"][ORACLE_IN_METADATA[task]] if task in ORACLE_IN_METADATA else entry["answer"]
    return oracle


@pytest.mark.parametrize("task", sorted(set(TASKS) - WITHOUT_ORACLE))
def test_the_oracle_answer_of_a_task_scores_one_in_a_rollout(gym: ReasoningGymEnvironment, task: str) -> None:
    played = answered(gym, oracle_of(gym, task), task)
    question = made(gym, task)["question"]
    assert played.message_log[0]["content"] == f"{question}\n\n{gym.instruction}"
    assert (played.total_reward, played.terminated) == (1.0, True)


@pytest.mark.parametrize("task", sorted(WITHOUT_ORACLE))
def test_a_task_without_an_oracle_scores_as_the_library_does(gym: ReasoningGymEnvironment, task: str) -> None:
    score = _dataset_of(task, SEED, None, "{}").score_answer("nothing", made(gym, task))
    assert answered(gym, "nothing", task).total_reward == score


@pytest.mark.parametrize("task", ["chain_sum", "countdown", "n_queens"])
@pytest.mark.parametrize("answer", ["", "certainly", "[", "x" * 10_000])
def test_a_wrong_answer_scores_what_the_library_gives_it(gym: ReasoningGymEnvironment, task: str, answer: str) -> None:
    score = _dataset_of(task, SEED, None, "{}").score_answer(answer, made(gym, task))
    assert answered(gym, answer, task).total_reward == score


@pytest.mark.parametrize("task", ["chain_sum", "sudoku", "maze"])
def test_a_higher_level_is_another_puzzle_and_its_oracle_scores_one(gym: ReasoningGymEnvironment, task: str) -> None:
    easy, hard = (answered(gym, oracle_of(gym, task, level), task, level=level) for level in (0, 5))
    assert easy.message_log[0] != hard.message_log[0]
    assert (easy.total_reward, hard.total_reward) == (1.0, 1.0)


def test_a_puzzle_that_the_library_cannot_make_is_rejected(gym: ReasoningGymEnvironment) -> None:
    with pytest.raises(SampleRejected, match="The puzzle of task knight_swap cannot be made: "):
        play(gym, [], sample_of("knight_swap", level=0))


def test_settings_of_a_dataset_come_from_the_config() -> None:
    environment = ReasoningGymEnvironment(
        tasks=["chain_sum"], configs={"chain_sum": {"min_terms": 9, "max_terms": 9}}, workers=1
    )
    try:
        [sample] = environment.example_samples(1, seed=0)
        question = play(environment, [], sample).message_log[0]["content"]
        assert len(re.findall(r"[-+] ", question)) == 8
        with pytest.raises(SampleRejected, match="there is no 'sudoku'; there is chain_sum"):
            play(environment, [], sample_of("sudoku"))
    finally:
        environment.close()


def test_wrong_tasks_and_settings_are_refused_when_the_environment_is_made() -> None:
    with pytest.raises(ValueError, match="reasoning-gym has no tasks chain_some"):
        ReasoningGymEnvironment(tasks=["chain_some"])
    with pytest.raises(ValueError, match="the task chain_sum of reasoning-gym does not take"):
        ReasoningGymEnvironment(configs={"chain_sum": {"min_turns": 1}})


@pytest.mark.parametrize(
    ("task", "answer"),
    [
        ("string_insertion", "__import__('pathlib').Path({path!r}).touch()"),
        ("spiral_matrix", "[__import__('pathlib').Path({path!r}).touch()]"),
        ("simple_integration", "__import__('pathlib').Path({path!r}).touch()"),
        *((task, "open({path!r}, 'w')") for task in ("polynomial_multiplication", "puzzle24", "countdown")),
    ],
)
def test_an_answer_of_code_is_not_run(gym: ReasoningGymEnvironment, tmp_path: Path, task: str, answer: str) -> None:
    touched = tmp_path / "touched"
    assert answered(gym, answer.format(path=str(touched)), task).total_reward < 0.1
    assert not touched.exists()


def test_no_module_of_the_package_evaluates_text_that_was_not_looked_at() -> None:
    """A new version that evaluates more must be read before it is used."""
    root = Path(reasoning_gym.__file__).parent
    evaluating = {
        file.stem
        for file in root.rglob("*.py")
        if re.search(r"(?<![.\w])(eval|exec|sympify|parse_expr)\(", file.read_text(encoding="utf-8"))
    }
    generators = {"basic_arithmetic", "bitwise_arithmetic", "codeio", "generators_00_49", "generators_50_99"}
    of_their_own_problems = generators | {"propositional_logic"}
    literals = {"string_insertion", "spiral_matrix", "number_sorting", "binary_matrix", "n_queens"}
    assert evaluating - of_their_own_problems - literals == {"puzzle24", "countdown"}


@pytest.mark.parametrize(
    "text", ["x.real", "open('f')", "a[0]", "exec", "__import__", "lambda", "x_", "1;2", "{}", "9" * 50 + "!"]
)
def test_expressions_that_could_be_code_are_not(text: str) -> None:
    with pytest.raises(ValueError, match="the expression has"):
        _refuse_unknown_names(text)
    for arithmetic in ("(8 / (3 - 8/3))", "x**2/2 + C", "-cos(x) + 3.5*exp(2*x) - .5", "sqrt(2)*log(x1)"):
        _refuse_unknown_names(arithmetic)


def test_an_answer_that_never_ends_costs_its_own_sample_alone() -> None:
    environment = ReasoningGymEnvironment(tasks=["countdown", "chain_sum"], workers=1, processor_time_limit_s=2)
    try:
        tower = play(environment, ["<answer>" + "9**" * 20 + "9</answer>"], sample_of("countdown"))
        assert tower.total_reward <= 0.01
        assert answered(environment, oracle_of(environment, "chain_sum"), "chain_sum").total_reward == 1.0
    except TemporaryFailure as error:
        raise AssertionError("The worker did not end by its own limit.") from error
    finally:
        environment.close()


def test_it_keeps_the_rules_for_environments() -> None:
    check(lambda: ReasoningGymEnvironment(tasks=["chain_sum", "maze"], workers=1), samples=2, max_block_s=30)
