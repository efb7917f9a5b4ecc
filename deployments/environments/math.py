"""Math problems with one right answer, checked by math-verify in a process that can be killed.

Three facts shape this file. math-verify bounds its own work with `signal.alarm`, which only a main thread may use, and
a replica runs user code elsewhere. `\\boxed{10^{10^{10^{10}}}}` keeps sympy busy, inside one call that holds the
interpreter lock, for longer than anyone waits. And a worker busy with that does not see its parent die. So checks run
in worker processes under three limits that need no Python code to cooperate: the pool kills a worker at the time limit,
the kernel's alarm ends it shortly after should the pool be gone, and its memory is bounded.
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

from deployments.failures import EnvironmentLost, EnvironmentRejected
from rollout_env import ChatMessage, StepOutcome, TaskEnvironment

BOX_PARTS = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)
LARGEST_OPERAND = 99
LONGEST_GROUND_TRUTH = 1000

# Long enough that the pool, which looks every 0.1 s, is first while it lives.
ALARM_GRACE_S = 1.0

# What a check may allocate on top of the loaded libraries; honest ones need a few MiB.
CHECK_MEMORY_BYTES = 1 << 30


class Check(NamedTuple):
    """What the worker found: `correct` is None where the ground truth itself cannot be read."""

    correct: bool | None
    extracted: str | None


def last_box(text: str) -> str | None:
    """The content of the last `\\boxed{...}` whose braces are balanced, `None` without one. Linear in the text."""
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
    """The ground truth as LaTeX: floats without an exponent, which LaTeX would read as a product with e."""
    if isinstance(ground_truth, float):
        finite = Decimal(repr(ground_truth))
        return f"{finite:f}" if finite.is_finite() else ""
    return str(ground_truth).strip()


def prepare_worker() -> None:
    """Bounds this worker's memory, lets signals kill it outright, and loads what the first check would wait for."""
    # It warns once a process that its own time limits are off, which is why these workers exist.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    check("42", "\\boxed{42}")
    mapped_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = mapped_pages * resource.getpagesize() + CHECK_MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


def check_within(limit_s: float, ground_truth: str, response: str) -> Check:
    """`check`, in a worker: the kernel ends the process after `limit_s` even when nobody is left to kill it."""
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        return check(ground_truth, response)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def check(ground_truth: str, response: str) -> Check:
    """Compares what math-verify reads out of `response` with `ground_truth`. Takes as long as it takes."""
    from math_verify import parse, verify  # type: ignore[import-untyped]

    def read(text: str) -> list[Any]:
        return list(parse(text, parsing_timeout=None))

    expected: list[Any] = []
    for text in (f"\\boxed{{{ground_truth}}}", ground_truth):
        expected = read(text)
        if any(not isinstance(item, str) for item in expected):
            break
    else:
        return Check(correct=None, extracted=None)
    given = read(response)
    extracted = next((item for item in reversed(given) if isinstance(item, str)), None)
    return Check(correct=bool(given) and verify(expected, given, timeout_seconds=None), extracted=extracted)


class MathInfo(BaseModel):
    """What a problem needs for its answer to be checked; further fields are left alone."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)

    ground_truth: Annotated[StrictStr, Field(max_length=LONGEST_GROUND_TRUTH)] | StrictInt | StrictFloat
    """The right answer: a number or LaTeX, without `\\boxed`."""


class MathEnvironment(TaskEnvironment):
    """One response, right or wrong: reward 1.0 or 0.0. A response with boxes is judged by its last one alone."""

    description: ClassVar[str] = "Math problems with one right answer, boxed or plain; reward 1 when it is right."
    ExtraEnvInfo: ClassVar[type[BaseModel]] = MathInfo

    def __init__(self, workers: int = 1, check_timeout_s: float = 5.0) -> None:
        """Starts `workers` processes in the background; a check is given up after `check_timeout_s`."""
        self.workers = workers
        self.check_timeout_s = check_timeout_s
        self.pool = self.start_pool()

    async def step(self, message_log: list[ChatMessage], extra_env_info: MathInfo) -> StepOutcome:
        """Judges the response.

        Raises:
            EnvironmentRejected: when math-verify cannot read the ground truth.
            EnvironmentLost: when the worker died of something other than its limits.
        """
        response = message_log[-1]["content"]
        boxed = last_box(response)
        expected = ground_truth_text(extra_env_info.ground_truth)
        try:
            found = await self.checked(expected, response if boxed is None else f"\\boxed{{{boxed}}}")
        except TimeoutError:
            note = f"not checked. The check took longer than {self.check_timeout_s:g} s."
            return judged(f"Environment: {note}", correct=False, answer=boxed)
        if found.correct is None:
            value = extra_env_info.ground_truth
            raise EnvironmentRejected(f"extra_env_info.ground_truth is no mathematical expression: {value!r}")
        verdict = "correct" if found.correct else f"incorrect. Expected {expected}."
        return judged(f"Environment: {verdict}", found.correct, found.extracted if boxed is None else boxed)

    async def checked(self, ground_truth: str, response: str) -> Check:
        """Runs the check in the pool. Raises `TimeoutError` at the limit and `EnvironmentLost` when the worker died."""
        # A worker killed between two checks leaves pebble's pool unusable for good.
        if not self.pool.active:
            broken, self.pool = self.pool, self.start_pool()
            await asyncio.to_thread(broken.join)
        limit_s = self.check_timeout_s
        future = self.pool.schedule(check_within, (limit_s + ALARM_GRACE_S, ground_truth, response), timeout=limit_s)
        try:
            return await asyncio.wrap_future(future)
        except ProcessExpired as error:
            if error.exitcode == -signal.SIGALRM:
                raise TimeoutError from error
            raise EnvironmentLost(f"The process checking the answer ended with exit code {error.exitcode}.") from error
        except BrokenProcessPool as error:
            raise EnvironmentLost("The process for checking answers ended before this one's turn.") from error

    def start_pool(self) -> ProcessPool:
        # Workers are forked from a server that has the libraries loaded, so replacing a killed one is quick; forking
        # the replica itself would copy its threads' locks.
        context: ForkServerContext = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["math_verify", __name__])
        pool = ProcessPool(max_workers=self.workers, initializer=prepare_worker, context=context)
        assert pool.active  # asking is what starts it
        return pool

    def close(self) -> None:
        """Ends the workers."""
        self.pool.stop()  # type: ignore[no-untyped-call]
        self.pool.join()

    def example_samples(self, count: int, seed: int) -> list[dict[str, Any]]:
        """Additions of two numbers from 0 to 99, no two alike as long as there are enough of them."""
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


def judged(observation: str, correct: bool, answer: str | None) -> StepOutcome:
    return StepOutcome(
        observation={"role": "user", "content": observation},
        reward=1.0 if correct else 0.0,
        terminated=True,
        answer=answer,
    )
