"""Math problems with one right answer, compared by math-verify in a process that can be killed.

math-verify cannot be trusted to end in time:

- Its own time limit uses `signal.alarm`, which works only in a main thread; a replica runs an environment in another.
- `\\boxed{10^{10^{10^{10}}}}` keeps sympy in one call, which holds the interpreter lock, for an unbounded time.
- A process in such a call does not notice that its parent has died.

So comparisons run in worker processes with three limits that need no Python code of the worker: the pool kills a worker
at the time limit; the kernel's alarm ends it shortly afterwards, in case the pool is gone; its memory is bounded.
"""

import asyncio
import logging
import multiprocessing
import random
import re
import resource
import signal
from concurrent.futures.process import BrokenProcessPool
from decimal import Decimal
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

from pebble import ProcessExpired, ProcessPool
from pydantic import BaseModel, ConfigDict, Field, StrictFloat, StrictInt, StrictStr

from deployments.failures import EnvironmentLost
from rollout_env import ChatMessage, SampleRejected, StepOutcome, TaskEnvironment

BOX_PARTS = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)
LARGEST_OPERAND = 99
LONGEST_GROUND_TRUTH = 1000

ALARM_GRACE_S = 1.0
"""The pool looks at its workers every 0.1 s: while it lives, it ends a worker before the alarm does."""

COMPARISON_MEMORY_BYTES = 2**30
"""What a comparison may allocate beyond the loaded libraries. Ordinary ones need a few MiB."""


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
    """Bounds this worker's memory, lets signals end it at once, and loads what the first comparison needs."""
    # It warns in each process that its own time limits are off.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    compare("42", "\\boxed{42}")
    mapped_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = mapped_pages * resource.getpagesize() + COMPARISON_MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


def compare_within(limit_s: float, ground_truth: str, response: str) -> Comparison:
    """`compare` in a worker; the kernel ends the process after `limit_s` seconds, also when its parent has died."""
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        return compare(ground_truth, response)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


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

    def __init__(self, workers: int = 1, check_timeout_s: float = 5.0) -> None:
        """Starts `workers` processes in the background. A comparison is ended after `check_timeout_s` seconds."""
        self.workers = workers
        self.check_timeout_s = check_timeout_s
        self.pool = self.start_pool()

    async def step(self, message_log: list[ChatMessage], extra_env_info: MathInfo) -> StepOutcome:
        """Judges the response.

        Raises:
            SampleRejected: math-verify cannot read the ground truth.
            EnvironmentLost: the worker died of something other than its limits.
        """
        response = message_log[-1]["content"]
        boxed = last_box(response)
        expected = ground_truth_text(extra_env_info.ground_truth)
        try:
            found = await self.comparison(expected, response if boxed is None else f"\\boxed{{{boxed}}}")
        except TimeoutError:
            note = f"not checked. The check took longer than {self.check_timeout_s:g} s."
            return outcome_of(f"Environment: {note}", correct=False, answer=boxed)
        if found.correct is None:
            value = extra_env_info.ground_truth
            raise SampleRejected(f"extra_env_info.ground_truth is no mathematical expression: {value!r}")
        verdict = "correct" if found.correct else f"incorrect. Expected {expected}."
        return outcome_of(f"Environment: {verdict}", found.correct, found.extracted if boxed is None else boxed)

    async def comparison(self, ground_truth: str, response: str) -> Comparison:
        """Compares in the pool. Raises `TimeoutError` at the time limit and `EnvironmentLost` if the worker died."""
        # pebble's pool stays unusable after a worker was killed between two comparisons.
        if not self.pool.active:
            broken, self.pool = self.pool, self.start_pool()
            await asyncio.to_thread(broken.join)
        limit_s = self.check_timeout_s
        future = self.pool.schedule(compare_within, (limit_s + ALARM_GRACE_S, ground_truth, response), timeout=limit_s)
        try:
            return await asyncio.wrap_future(future)
        except ProcessExpired as error:
            if error.exitcode == -signal.SIGALRM:
                raise TimeoutError from error
            raise EnvironmentLost(f"The process checking the answer ended with exit code {error.exitcode}.") from error
        except BrokenProcessPool as error:
            raise EnvironmentLost("The process for checking answers ended before this one's turn.") from error

    def start_pool(self) -> ProcessPool:
        # Workers are forked from a server that has the libraries loaded, so a killed one is replaced quickly. A fork of
        # the replica itself would copy the locks of its threads.
        context: ForkServerContext = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["math_verify", __name__])
        pool = ProcessPool(max_workers=self.workers, initializer=prepare_worker, context=context)
        assert pool.active  # Reading this property starts the workers.
        return pool

    def close(self) -> None:
        """Ends the worker processes."""
        self.pool.stop()  # type: ignore[no-untyped-call]
        self.pool.join()

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
