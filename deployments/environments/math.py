"""Math problems with one right answer, compared by math-verify in worker processes (`worker_pool`).

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
import re
import resource
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, StrictFloat, StrictInt, StrictStr

from deployments.environments.assigned_cores import assigned_cores
from deployments.environments.worker_pool import ProcessorTimeExceeded, WorkerPool
from rollout_env import ChatMessage, SampleRejected, StepOutcome, TaskEnvironment

BOX_PARTS = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)
LARGEST_OPERAND = 99
LONGEST_GROUND_TRUTH = 1000

COMPARISON_MEMORY_BYTES = 2**30
"""What a comparison may allocate beyond the loaded libraries. Ordinary ones need a few MiB."""

STEPS_PER_WORKER = 2
"""One is compared while the next one waits at the worker, because a comparison takes about as long, a millisecond, as
sending the next one. More would wait where their clock has begun already."""

logger = logging.getLogger("rollout_service.environments")


class Comparison(NamedTuple):
    """The result of a worker."""

    correct: bool | None
    """None if the ground truth is no mathematical expression."""
    extracted: str | None
    """The answer that math-verify read out of the response."""


def last_box(text: str) -> str | None:
    """The content of the last `\\boxed{...}` with balanced braces, `None` without one. Takes linear time."""
    opened: list[tuple[int, bool]] = []
    last_start, content = -1, None
    for part in BOX_PARTS.finditer(text):
        if part[0].endswith("{") and part[0] != "\\{":
            opened.append((part.end(), len(part[0]) > 1))
        elif part[0] == "}" and opened:
            start, is_box = opened.pop()
            if is_box and start > last_start:
                last_start, content = start, text[start : part.start()]
    return content


def ground_truth_text(ground_truth: str | int | float) -> str:
    """The ground truth as LaTeX. Floats have no exponent, which LaTeX would read as a product with e."""
    if isinstance(ground_truth, float):
        finite = Decimal(repr(ground_truth))
        return f"{finite:f}" if finite.is_finite() else ""
    return str(ground_truth).strip()


def prepare_worker() -> None:
    """Bounds this worker's memory, and loads what the first comparison needs."""
    # It warns in each process that its own time limits are off.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    compare("42", "\\boxed{42}")
    mapped_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = mapped_pages * resource.getpagesize() + COMPARISON_MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


def compare(ground_truth: str, response: str) -> Comparison:
    """Compares the answer in `response` with `ground_truth`, without a time limit."""
    from math_verify import parse, verify  # type: ignore[import-untyped]

    def read(text: str) -> list[Any]:
        return list(parse(text, parsing_timeout=None))

    expected: list[Any] = []
    for text in (f"\\boxed{{{ground_truth}}}", ground_truth):
        expected = read(text)
        if any(not isinstance(item, str) for item in expected):
            break
    else:
        return Comparison(correct=None, extracted=None)
    given = read(response)
    extracted = next((item for item in reversed(given) if isinstance(item, str)), None)
    return Comparison(correct=bool(given) and verify(expected, given, timeout_seconds=None), extracted=extracted)


class MathInfo(BaseModel):
    """The `extra_env_info` of a math problem; further fields are ignored."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False, use_attribute_docstrings=True)

    ground_truth: Annotated[StrictStr, Field(max_length=LONGEST_GROUND_TRUTH)] | StrictInt | StrictFloat
    """The right answer: a number or LaTeX, without `\\boxed`."""


class MathEnvironment(TaskEnvironment):
    """One turn: reward 1.0 for a right answer, else 0.0. If the response has boxes, only the last one counts."""

    description: ClassVar[str] = "Math problems with one right answer, boxed or plain; reward 1 when it is right."
    ExtraEnvInfo: ClassVar[type[BaseModel]] = MathInfo

    def __init__(
        self, workers: int | None = None, processor_time_limit_s: float = 5.0, lost_after_s: float = 60.0
    ) -> None:
        """Starts the worker processes in the background.

        Args:
            workers: how many; by default the `num_cpus` that Ray reserves for the replica, rounded up.
            processor_time_limit_s: of one comparison, in seconds. An answer that needs more is wrong.
            lost_after_s: seconds of wall time after which a comparison is given up and tried again.
        """
        self.processor_time_limit_s = processor_time_limit_s
        workers = assigned_cores() if workers is None else workers
        self.max_concurrent_steps = STEPS_PER_WORKER * workers
        self.pool = WorkerPool(workers, prepare_worker, ["math_verify", __name__], lost_after_s)

    async def step(self, message_log: list[ChatMessage], extra_env_info: MathInfo) -> StepOutcome:
        """Judges the response.

        Raises:
            SampleRejected: math-verify cannot read the ground truth.
            EnvironmentLost: the comparison has no result, for a reason other than its limits.
        """
        response = message_log[-1]["content"]
        boxed = last_box(response)
        expected = ground_truth_text(extra_env_info.ground_truth)
        answer = response if boxed is None else f"\\boxed{{{boxed}}}"
        try:
            found = await self.pool.run(self.processor_time_limit_s, compare, expected, answer)
        except ProcessorTimeExceeded as error:
            logger.info("An answer was judged wrong because comparing it took %s.", error)
            return outcome_of(f"Environment: incorrect. The check took {error}.", correct=False, answer=boxed)
        if found.correct is None:
            value = extra_env_info.ground_truth
            raise SampleRejected(f"extra_env_info.ground_truth is no mathematical expression: {value!r}")
        verdict = "correct" if found.correct else f"incorrect. Expected {expected}."
        return outcome_of(f"Environment: {verdict}", found.correct, found.extracted if boxed is None else boxed)

    def close(self) -> None:
        """Ends the worker processes."""
        self.pool.close()

    def example_samples(self, count: int, seed: int) -> list[dict[str, Any]]:
        """Additions of two numbers from 0 to 99, all different if `count` is at most 10,000."""
        draw = random.Random(seed)
        per_operand = LARGEST_OPERAND + 1
        repeats = -(-count // per_operand**2)
        pairs = draw.sample(range(per_operand**2), k=count, counts=[repeats] * per_operand**2)
        return [addition_sample(*divmod(pair, per_operand)) for pair in pairs]


def addition_prompt(left: int, right: int) -> str:
    """The question, e.g. `What is 17 + 25?`."""
    return f"What is {left} + {right}?"


def addition_sample(left: int, right: int) -> dict[str, Any]:
    """One addition as a sample of a rollout request."""
    return {
        "messages": [{"role": "user", "content": addition_prompt(left, right)}],
        "extra_env_info": {"ground_truth": str(left + right)},
    }


def outcome_of(observation: str, correct: bool, answer: str | None) -> StepOutcome:
    return StepOutcome(
        observation={"role": "user", "content": observation},
        reward=1.0 if correct else 0.0,
        terminated=True,
        answer=answer,
    )
