"""The task `math`: problems with one right answer, compared by math-verify in worker processes.

math-verify cannot be trusted to end in time:

- Its own time limit uses `signal.alarm`, which works only in a main thread; a replica runs an environment in another.
- `\\boxed{10^{10^{10^{10}}}}` keeps sympy in one call, which holds the interpreter lock, for an unbounded time.
- A process in such a call does not notice that its parent has died.

So comparisons run in worker processes that the kernel ends, without any Python code of the worker: at a limit of
processor time, and when they allocate too much memory. Such an answer is wrong, as it is for math-verify itself. A
comparison that is late for any other reason says nothing about the answer: the step is lost and tried again.
"""

import logging
import random
import resource
from collections.abc import Mapping
from decimal import Decimal
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, StrictFloat, StrictInt, StrictStr, ValidationInfo, field_validator

from deployments.tasks.math_latex import as_text, is_prose, normalized
from deployments.tasks.replies import Answer, AnswerForm, answer_in, last_box, letter_of, text_outcome
from deployments.tasks.support import PooledEnvironment
from rollout_env import ChatMessage, Reference, SampleRejected, StepOutcome
from rollout_env.worker_pool import ProcessorTimeExceeded

_COMPARISON_MEMORY_BYTES = 2**30
"""Memory that a comparison may allocate beyond the loaded libraries. Ordinary ones need a few MiB."""
_DELIMITERS = ("$", "\\(", "\\[", "\\boxed")


class _MathComparison(NamedTuple):
    """The result of a worker."""

    correct: bool | None
    """None if the ground truth is not a mathematical expression."""
    extracted: str | None
    """The answer that math-verify read out of the response."""


def _ground_truth_text(ground_truth: str | int | float) -> str:
    """The ground truth as LaTeX. Floats have no exponent, which LaTeX would read as a product with e."""
    if isinstance(ground_truth, float):
        finite = Decimal(repr(ground_truth))
        return f"{finite:f}" if finite.is_finite() else ""
    return str(ground_truth).strip()


def _prepare_worker() -> None:
    """Bounds this worker's memory, and loads what the first comparison needs."""
    # It warns in each process that its own time limits are off.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    _compare("42", "\\boxed{42}")
    mapped_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = mapped_pages * resource.getpagesize() + _COMPARISON_MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _compare(ground_truth: str, response: str) -> _MathComparison:
    """Compares the answer in `response` with `ground_truth`, without a time limit."""
    from deployments.tasks.math_exact import is_equal

    expected = _expected_of(ground_truth)
    if not expected:
        return _MathComparison(correct=None, extracted=None)
    for text in dict.fromkeys((normalized(response, keeps_words=True), normalized(response))):
        given = _parsed(text)
        extracted = next((item for item in reversed(given) if isinstance(item, str)), None)
        correct = _is_same_text(normalized(ground_truth), extracted) or (bool(given) and is_equal(expected, given))
        if correct:
            break
    return _MathComparison(correct, extracted)


def _is_same_text(ground_truth: str, answer: str | None) -> bool:
    """Whether the answer is the ground truth to the letter, as is `even` for `\\text{even}`; an empty one is not."""
    return answer is not None and as_text(answer) == as_text(ground_truth) != ""


@lru_cache(maxsize=256)
def _expected_of(ground_truth: str) -> list[Any]:
    """The parsed ground truth, which the rollouts of a group share; empty if math-verify cannot read it."""
    expected = next(filter(_has_expression, map(_read, _readings(ground_truth))), [])
    # A text between delimiters that is not an expression is compared as a text.
    return expected or (_read(ground_truth) if _has_delimiters(ground_truth) else [])


def _read(text: str) -> list[Any]:
    """Expressions, and the text in which they were found. A number outside of an unreadable box is not an answer."""
    return _parsed(normalized(text))


def _parsed(text: str) -> list[Any]:
    from math_verify import LatexExtractionConfig, parse  # type: ignore[import-untyped]

    limited = {"extraction_config": [LatexExtractionConfig()]} if last_box(text) is not None else {}
    return [_with_imaginary_unit(item) for item in parse(text, **limited, parsing_timeout=None)]


def _with_imaginary_unit(item: Any) -> Any:
    """The expression with i as the imaginary unit: math-verify takes it for one of two variables, by what is beside."""
    from sympy import I  # type: ignore[import-untyped]

    named = [symbol for symbol in getattr(item, "free_symbols", ()) if symbol.name == "i"]
    try:
        return item.xreplace(dict.fromkeys(named, I)) if named else item
    except (TypeError, ValueError):
        # Such as of an inequality, which no imaginary number satisfies: it is another i.
        return item


def _readings(ground_truth: str) -> tuple[str, str]:
    """The texts as which a ground truth is tried to be read: one that has delimiters of LaTeX first as it is."""
    boxed = f"\\boxed{{{ground_truth}}}"
    return (ground_truth, boxed) if _has_delimiters(ground_truth) else (boxed, ground_truth)


def _has_delimiters(text: str) -> bool:
    # The dollar sign of a price is not a delimiter.
    formula = text.replace(r"\$", "")
    return any(delimiter in formula for delimiter in _DELIMITERS)


def _has_expression(items: list[Any]) -> bool:
    """Whether math-verify found more than texts."""
    return any(not isinstance(item, str) for item in items)


_LARGEST_OPERAND = 99


def _addition_prompt(left: int, right: int) -> str:
    """The question, e.g. `What is 17 + 25?`."""
    return f"What is {left} + {right}?"


def _addition_sample(left: int, right: int) -> dict[str, Any]:
    """One addition as a sample of a rollout request."""
    return {
        "messages": [{"role": "user", "content": _addition_prompt(left, right)}],
        "extra_env_info": {"ground_truth": str(left + right)},
    }


_LONGEST_GROUND_TRUTH = 1000
_PROSE = (
    "it is prose, of which no number can be taken as the answer: give the answer alone, as a number or LaTeX, words "
    "within \\text{}; or set text_answers among the task's arguments to compare prose as a text"
)

_EXACT = "deployments.tasks.math_exact"
"""Imports sympy, which this process need not have."""
_STEPS_PER_WORKER = 2
"""One is compared while the next one waits at the worker, because a comparison takes about as long, a millisecond, as
sending the next one. More would wait where their clock has begun already."""

logger = logging.getLogger("rollout_service.environments")


class _MathInfo(BaseModel):
    """The `extra_env_info` of a math problem; further fields are ignored."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False, use_attribute_docstrings=True)

    default_form: ClassVar[AnswerForm] = "any"
    text_answers: ClassVar[bool] = False
    answer_form: AnswerForm | None = None
    """Where the answer of a response is, in place of the environment's `answer_form`."""
    ground_truth: Annotated[StrictStr, Field(max_length=_LONGEST_GROUND_TRUTH)] | StrictInt | StrictFloat
    """The right answer: a number or LaTeX, with or without `$` around it; the letter of the right choice."""

    @field_validator("ground_truth")
    @classmethod
    def refuse_prose(cls, given: str | int | float, info: ValidationInfo) -> str | int | float:
        """A number somewhere in a sentence would be taken for the right answer."""
        form = info.data.get("answer_form") or cls.default_form
        if isinstance(given, str) and form != "choice" and not cls.text_answers and is_prose(given):
            raise ValueError(_PROSE)
        return given


_Verdict = tuple[bool, str, str | None]
"""Whether the answer is right, the reason as the observation tells it, and the answer."""


class MathEnvironment(PooledEnvironment):
    """One turn: the reward `correctness` is 1.0 for a right answer, else 0.0."""

    description: ClassVar[str] = "Math problems with one right answer, boxed or plain; reward 1 when it is right."
    ExtraEnvInfo: ClassVar[type[BaseModel]] = _MathInfo

    def __init__(
        self,
        workers: int | None = None,
        processor_time_limit_s: float = 5.0,
        answer_form: AnswerForm = "any",
        wrong_reward: float = 0.0,
        format_reward: float | None = None,
        text_answers: bool = False,
    ) -> None:
        """Starts the worker processes in the background.

        Args:
            workers: how many; by default the `num_cpus` that Ray reserves for the replica, rounded up.
            processor_time_limit_s: of one comparison, in seconds. An answer that needs more is wrong.
            answer_form: where the answer is. `any`: wherever math-verify finds it; `boxed`: in the last box only;
                `answer_line`: behind the last `Answer:`; `choice`: the letter of a choice, in the last box or behind
                the last `Answer:`.
            wrong_reward: the reward `correctness` of a wrong answer, such as -1.
            format_reward: a second reward, `format`, for a response that has the form, whether its answer is right or
                not; none by default.
            text_answers: compare a ground truth that is prose as a text, without case and further spaces, with what is
                in the last box or behind the last `Answer:`, or else with the whole response. By default such samples
                are refused.
        """
        self.processor_time_limit_s = processor_time_limit_s
        self.answer_form: AnswerForm = answer_form
        constants = {"default_form": answer_form, "text_answers": text_answers, "__doc__": _MathInfo.__doc__}
        self.ExtraEnvInfo = type("MathInfo", (_MathInfo,), constants)  # type: ignore[misc]
        self.wrong_reward = wrong_reward
        self.format_reward = format_reward
        preloaded = ["math_verify", __name__, _EXACT]
        self.start_pool(workers, _STEPS_PER_WORKER, _prepare_worker, preloaded)

    async def step(self, message_log: list[ChatMessage], extra_env_info: _MathInfo) -> StepOutcome:
        """Judges the response.

        Raises:
            SampleRejected: math-verify cannot read the ground truth.
            TemporaryFailure: the comparison has no result, for a reason other than its limits.
        """
        form = extra_env_info.answer_form or self.answer_form
        response, ground_truth = message_log[-1]["content"], extra_env_info.ground_truth
        answer = answer_in(response, form)
        if form == "choice":
            choice = _choice_of(ground_truth)
            verdict = _verdict_of(answer.text == choice, choice, answer.text)
        elif isinstance(ground_truth, str) and is_prose(ground_truth):
            text = response if answer.text is None and form == "any" else answer.text
            verdict = _verdict_of(_is_same_text(ground_truth, text), ground_truth, text)
        else:
            verdict = await self._verdict(answer, ground_truth)
        correct, reason, told = verdict
        rewards = {"correctness": 1.0 if correct else self.wrong_reward}
        if self.format_reward is not None:
            rewards["format"] = self.format_reward if answer.is_formatted else 0.0
        return text_outcome(f"Environment: {reason}", rewards, terminated=True, answer=told)

    async def _verdict(self, answer: Answer, ground_truth: str | int | float) -> _Verdict:
        expected = _ground_truth_text(ground_truth)
        try:
            found = await self.pool.run(self.processor_time_limit_s, _compare, expected, answer.latex)
        except ProcessorTimeExceeded as error:
            logger.info("An answer was judged wrong because comparing it took %s.", error)
            return False, f"incorrect. The check took {error}.", answer.text
        if found.correct is None:
            raise SampleRejected(f"extra_env_info.ground_truth is not a mathematical expression: {ground_truth!r}")
        text = found.extracted if answer.text is None else answer.text
        return _verdict_of(found.correct, expected, text)

    def reference(self, sample: Mapping[str, Any]) -> Reference:
        """The ground truth in the form of an answer."""
        info, format_reward = sample["extra_env_info"], self.format_reward or 0.0
        is_boxed = (info.get("answer_form") or self.answer_form) in ("any", "boxed")
        reply = f"\\boxed{{{info['ground_truth']}}}" if is_boxed else f"Answer: {info['ground_truth']}"
        return Reference([reply], best=1.0 + format_reward, floor=self.wrong_reward + format_reward)

    def example_samples(self, count: int, seed: int) -> list[dict[str, Any]]:
        """Additions of two numbers from 0 to 99, all different if `count` is at most 10,000."""
        draw = random.Random(seed)
        per_operand = _LARGEST_OPERAND + 1
        repeats = -(-count // per_operand**2)
        pairs = draw.sample(range(per_operand**2), k=count, counts=[repeats] * per_operand**2)
        return [_addition_sample(*divmod(pair, per_operand)) for pair in pairs]


def _choice_of(ground_truth: str | int | float) -> str:
    """The letter of the right choice. Raises `SampleRejected` if the ground truth is not a letter."""
    if (letter := letter_of(str(ground_truth))) is None:
        raise SampleRejected(f"extra_env_info.ground_truth is not the letter of a choice: {ground_truth!r}")
    return letter


def _verdict_of(correct: bool, expected: str, answer: str | None) -> _Verdict:
    return correct, "correct" if correct else f"incorrect. Expected {expected}.", answer
