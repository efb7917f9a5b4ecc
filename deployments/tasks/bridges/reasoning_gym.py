"""All tasks of reasoning-gym, by name: puzzles that are made from a seed, each with a verifier of its own.

A worker process makes the questions and scores the answers, because both are computation without bound for some tasks.
Some verifiers evaluate the answer as Python. Here they only read literals and expressions of known names: `eval` and
`parse_expr` are replaced in the workers.
"""

import ast
import json
import os
import re
import resource
import sys
from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from deployments.tasks.replies import last_tagged, text_outcome
from deployments.tasks.support import PooledEnvironment, imported, seeds_from
from rollout_env import ChatMessage, Reference, SampleRejected, StartOutcome, StepOutcome, reply_text
from rollout_env.worker_pool import ProcessorTimeExceeded

_FLOOR = 0.05
_STEPS_PER_WORKER = 64
_WORKER_BYTES = 8 * 2**30
"""Bound of a worker's address space: a power tower in an answer must not exhaust the machine's memory."""
_LITERAL_VERIFIERS = ("string_insertion", "spiral_matrix", "number_sorting", "binary_matrix", "n_queens")
"""Modules whose verifiers call `eval` with the answer to read a list."""
_EXPRESSION = re.compile(r"(?>(?:[-+*/^(),=\s]|\d++(?>(?:\.\d*+)?)|\.\d++|[A-Za-z]\w*+)*)")
"""Without attributes, indices and texts. It never goes back: a long answer takes time in proportion to its length."""
_CIRCULAR = [f"{arc}{name}{h}" for arc in ("", "a") for name in ("sin", "cos", "tan") for h in ("", "h")]
_EXPRESSION_NAMES = frozenset(["sec", "csc", "cot", "pi", "exp", "log", "ln", "sqrt", "Abs", *_CIRCULAR])
_DEFAULT_INSTRUCTION = "Write your final answer in <answer></answer>."


class _ReasoningGymInfo(BaseModel):
    """The `extra_env_info` of a puzzle, from which it is made; further fields are ignored."""

    model_config = ConfigDict(extra="ignore", use_attribute_docstrings=True)

    task: str
    """The name of a task of reasoning-gym, such as `chain_sum`."""
    seed: int = Field(ge=0, lt=2**32)
    """The seed of the puzzle."""
    level: int | None = Field(default=None, ge=0)
    """The difficulty, from 0; null for that of the environment. A task takes its highest if that is lower."""


class ReasoningGymEnvironment(PooledEnvironment):
    """One turn. The start makes the question; the reward is the score of the library, from 0 to 1."""

    description: ClassVar[str] = "Puzzles of reasoning-gym, made from a seed; reward by the score of the library."
    ExtraEnvInfo: ClassVar[type[BaseModel]] = _ReasoningGymInfo

    def __init__(
        self,
        tasks: list[str] | Literal["all"] = "all",
        level: Annotated[int, Field(ge=0)] | None = None,
        configs: dict[str, dict[str, Any]] | None = None,
        instruction: str = _DEFAULT_INSTRUCTION,
        workers: int | None = None,
        processor_time_limit_s: float = 10.0,
    ) -> None:
        """Starts the worker processes in the background.

        Args:
            tasks: those that samples may name.
            level: the difficulty of samples that name none; null for the library's own settings.
            configs: by task, settings of its dataset such as `{"chain_sum": {"max_terms": 4}}`; they go before levels.
            instruction: follows each question.
            workers: how many; by default the `num_cpus` that Ray reserves for the replica, rounded up.
            processor_time_limit_s: of making one question or scoring one answer, in seconds.

        Raises:
            PackageMissing: reasoning-gym is not installed.
            ValueError: there is no such task, or its dataset does not take the settings.
        """
        known = sorted(imported("reasoning_gym.factory", "reasoning-gym").DATASETS)
        self.tasks = known if tasks == "all" else tasks
        self.configs = configs or {}
        if unknown := sorted({*self.tasks, *self.configs} - set(known)):
            raise ValueError(f"reasoning-gym has no tasks {', '.join(unknown)}; it has {', '.join(known)}")
        self.tasks = [task for task in self.tasks if task != "composite" or task in self.configs]
        self.level = level
        self.instruction = instruction
        self.processor_time_limit_s = processor_time_limit_s
        for task, config in self.configs.items():
            _dataset_of(task, 0, None, json.dumps(config))
        # Some tasks iterate over sets of texts: with equal hashes, all workers of all replicas make equal puzzles.
        os.environ["PYTHONHASHSEED"] = "0"
        self.start_pool(workers, _STEPS_PER_WORKER, _prepare_worker, ["reasoning_gym", __name__])

    async def start(
        self,
        message_log: list[ChatMessage],  # noqa: ARG002 - the question follows whatever prompt there is
        extra_env_info: _ReasoningGymInfo,
    ) -> StartOutcome:
        """Adds the question to the prompt.

        Raises:
            SampleRejected: the environment does not have the task, or the puzzle takes too long to make.
            TemporaryFailure: there is no question, for another reason.
        """
        puzzle = self.puzzle_of(extra_env_info)
        try:
            question = await self.pool.run(self.processor_time_limit_s, _question_of, *puzzle)
        except ProcessorTimeExceeded as error:
            raise SampleRejected(f"The puzzle of task {extra_env_info.task} took {error} to make.") from error
        except ValueError as error:
            raise SampleRejected(f"The puzzle of task {extra_env_info.task} cannot be made: {error}") from error
        text = f"{question}\n\n{self.instruction}" if self.instruction else question
        return StartOutcome(observation={"role": "user", "content": text})

    async def step(self, message_log: list[ChatMessage], extra_env_info: _ReasoningGymInfo) -> StepOutcome:
        """Scores what the last `<answer>` of the response holds. An answer that takes too long to score is worth 0.

        Raises:
            SampleRejected: the environment does not have the task.
            TemporaryFailure: there is no score, for a reason other than the answer.
        """
        puzzle = self.puzzle_of(extra_env_info)
        answer = last_tagged(reply_text(message_log[-1]), "answer")
        if answer is None:
            return text_outcome("Environment: there is no <answer>.", terminated=True)
        try:
            score = await self.pool.run(self.processor_time_limit_s, _score_of, *puzzle, answer)
        except ProcessorTimeExceeded as error:
            text = f"Environment: the score is 0. To compute it took {error}."
            return text_outcome(text, terminated=True, answer=answer)
        return text_outcome(f"Environment: the score is {score:g}.", score, terminated=True, answer=answer)

    def puzzle_of(self, info: _ReasoningGymInfo) -> tuple[str, int, int | None, str]:
        """Task, seed, level and settings as JSON. Raises `SampleRejected` for a task that the environment lacks."""
        if info.task not in self.tasks:
            raise SampleRejected(f"extra_env_info.task: there is no {info.task!r}; there is {', '.join(self.tasks)}.")
        level = self.level if info.level is None else info.level
        return info.task, info.seed, level, json.dumps(self.configs.get(info.task, {}), sort_keys=True)

    async def reference(self, sample: Mapping[str, Any]) -> Reference:
        """The answer of the library, which scores another one by up to 0.05 for its form."""
        puzzle = self.puzzle_of(_ReasoningGymInfo(**sample["extra_env_info"]))
        answer = await self.pool.run(self.processor_time_limit_s, _answer_of, *puzzle)
        return Reference(None if answer is None else [f"<answer>{answer}</answer>"], floor=_FLOOR)

    def example_samples(self, count: int, seed: int) -> list[dict[str, Any]]:
        """Puzzles of all tasks in turn, with seeds of their own."""
        return [
            {"extra_env_info": {"task": self.tasks[place % len(self.tasks)], "seed": puzzle_seed}}
            for place, puzzle_seed in enumerate(seeds_from(seed, count))
        ]


def _prepare_worker() -> None:
    """Called in each worker before its first call."""
    resource.setrlimit(resource.RLIMIT_AS, (_WORKER_BYTES, _WORKER_BYTES))
    _let_verifiers_evaluate_no_code()


def _let_verifiers_evaluate_no_code() -> None:
    """Replaces what verifiers call with an answer: `eval` by one for literals, `parse_expr` by one for known names."""
    sympy = imported("sympy", "sympy")
    modules = {name: module for name, module in sys.modules.items() if name.startswith("reasoning_gym.")}
    for name, module in modules.items():
        if name.rpartition(".")[2] in _LITERAL_VERIFIERS:
            vars(module)["eval"] = ast.literal_eval
    parse_expr = sympy.parse_expr

    def parse_known_names(text: str, *args: Any, **kwargs: Any) -> Any:
        _refuse_unknown_names(text)
        return parse_expr(text, *args, **kwargs)

    for module in (sympy, *modules.values()):
        if vars(module).get("parse_expr") is parse_expr:
            vars(module)["parse_expr"] = parse_known_names


def _refuse_unknown_names(expression: str) -> None:
    """Raises `ValueError` for an expression that could run code: `parse_expr` evaluates it as Python."""
    if not _EXPRESSION.fullmatch(expression):
        raise ValueError("the expression has characters other than those of arithmetic")
    names = re.findall(r"[A-Za-z]\w*", expression)
    if unknown := [name for name in names if len(name.rstrip("0123456789")) > 1 and name not in _EXPRESSION_NAMES]:
        raise ValueError(f"the expression has unknown names: {unknown}")


@lru_cache(maxsize=256)
def _dataset_of(task: str, seed: int, level: int | None, config: str) -> Any:
    """The dataset whose first entry is the puzzle. Raises `ValueError` for settings that it does not take."""
    factory = imported("reasoning_gym.factory", "reasoning-gym")
    given: Mapping[str, Any] = json.loads(config) | {"seed": seed, "size": 1}
    try:
        if level is None or not factory.has_curriculum(task):
            return factory.create_dataset(task, **given)
        curriculum = factory.create_curriculum(task)
        for name, attribute in curriculum.attributes.items():
            curriculum.set_attr_level(name, min(level, len(attribute.levels) - 1))
        levelled = {**vars(curriculum.generate_configuration({"seed": seed, "size": 1})), **given}
        fields = factory.DATASETS[task][1].__dataclass_fields__
        return factory.create_dataset(task, **{name: value for name, value in levelled.items() if fields[name].init})
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(
            f"the task {task} of reasoning-gym does not take {config} at level {level}: {error}"
        ) from error


@lru_cache(maxsize=256)
def _entry_of(task: str, seed: int, level: int | None, config: str) -> Any:
    return _dataset_of(task, seed, level, config)[0]


def _question_of(task: str, seed: int, level: int | None, config: str) -> str:
    question: str = _entry_of(task, seed, level, config)["question"]
    return question


def _answer_of(task: str, seed: int, level: int | None, config: str) -> str | None:
    answer = _entry_of(task, seed, level, config)["answer"]
    return None if answer is None else str(answer)


def _score_of(task: str, seed: int, level: int | None, config: str, answer: str) -> float:
    """The library's score for the answer."""
    entry = _entry_of(task, seed, level, config)
    return float(_dataset_of(task, seed, level, config).score_answer(answer, entry))
