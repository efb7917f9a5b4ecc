"""The task `code`: the model's Python against given tests, or as an interpreter over turns, run in a sandbox.

`SandboxSettings` says which sandbox (`deployments/sandbox`) runs the programs, and what a run may use.
"""

import json
import random
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from deployments.sandbox import Limits, LocalSandbox, Program, Sandbox, SandboxLost, WallName
from deployments.tasks.code_judging import ENDED_BY, CodeInfo, judge
from deployments.tasks.replies import last_box, last_code_block, text_outcome
from deployments.tasks.support import assigned_cores
from rollout_env import ChatMessage, StepOutcome, TaskEnvironment, TemporaryFailure, reply_text

_RUNS_PER_CORE = 2
"""The kernel starts or ends one while the other one computes."""


class SandboxSettings(BaseModel):
    """Which sandbox runs programs, and what a run may use."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    isolation: Literal["auto", "bubblewrap", "limits"] = "auto"
    """`auto` takes the strongest one that works on the machine of the replica."""
    require: Literal["all"] | tuple[WallName, ...] = ()
    """Walls without which the environment does not start."""
    packages: tuple[str, ...] = ()
    """Folders that programs may import from, beside the standard library."""
    max_concurrent_runs: Annotated[int, Field(ge=1)] | None = None
    """Without it two for each of the `num_cpus` that Ray reserves for the replica."""
    time_limit_s: Annotated[float, Field(gt=0)] = 30.0
    """Wall time of one run, in seconds."""
    processor_time_limit_s: Annotated[float, Field(gt=0)] = 5.0
    """Processor time of all processes of one run together, in seconds."""
    memory_limit_mib: Annotated[int, Field(ge=32)] = 512
    """Memory of all processes of one run together, and address space of each."""
    max_processes: Annotated[int, Field(ge=1)] = 32
    """Processes and threads of one run."""

    @property
    def limits(self) -> Limits:
        return Limits(
            time_s=self.time_limit_s,
            processor_time_s=self.processor_time_limit_s,
            memory_bytes=self.memory_limit_mib * 2**20,
            processes=self.max_processes,
        )

    def concurrent_runs(self) -> int:
        """How many programs a replica runs at once."""
        return self.max_concurrent_runs or _RUNS_PER_CORE * assigned_cores()

    def start(self) -> Sandbox:
        """Starts the sandbox, which takes about a second.

        Raises:
            SandboxTooWeak: a required wall does not stand on this machine.
            SandboxLost: no program can be run.
        """
        return LocalSandbox(self.concurrent_runs(), self.isolation, self.require, self.packages)


_RUN_CELLS = (Path(__file__).parent / "programs" / "run_cells.py").read_text(encoding="utf-8")
_LONGEST_OUTPUT = 4000
"""Characters of a cell's output that the model gets to see."""
_MOST_CELLS, _LARGEST_CELL = 64, 65536


class CodeEnvironment(TaskEnvironment):
    """A sample with `tests` has one turn: the code block of the reply is run against them.

    A sample with a `ground_truth` has turns: the code block of each reply is run, after those of the replies before it,
    and the model gets its output. A reply without code ends the rollout; its last box must hold the ground truth.
    Of several blocks the last one that is marked as Python counts, or where none is, the last one without a language.
    """

    description: ClassVar[str] = "Python programs against given tests, or an interpreter to find an answer with."
    ExtraEnvInfo: ClassVar[type[BaseModel]] = CodeInfo

    def __init__(self, reward: Literal["all", "share"] = "all", sandbox: SandboxSettings | None = None) -> None:
        """Starts the sandbox, which takes about a second.

        Args:
            reward: `all` gives 1.0 if all tests pass, else 0.0; `share` gives the share of the tests that pass.
            sandbox: which sandbox, and what one run may use: see `SandboxSettings`.

        Raises:
            SandboxTooWeak: a required wall does not stand on this machine.
            SandboxLost: no program can be run.
        """
        settings = sandbox or SandboxSettings()
        self.reward = reward
        self.limits = settings.limits
        # A step has one run at a time; more would wait in the sandbox, where the clock of their step runs already.
        self.max_concurrent_steps = settings.concurrent_runs()
        self.sandbox = settings.start()

    async def step(self, message_log: list[ChatMessage], extra_env_info: CodeInfo) -> StepOutcome:
        """Runs the code of the reply.

        Raises:
            TemporaryFailure: the sandbox failed. The step is tried again.
        """
        reply = reply_text(message_log[-1])
        code = last_code_block(reply)
        try:
            if extra_env_info.tests:
                return await self._tested(code, extra_env_info)
            return await self._interpreted(code, reply, extra_env_info)
        except SandboxLost as error:
            raise TemporaryFailure(f"The sandbox failed: {error}") from error

    async def _tested(self, code: str | None, info: CodeInfo) -> StepOutcome:
        if code is None:
            return text_outcome("Environment: the reply has no code block.", terminated=True)
        all_or_nothing = self.reward == "all"
        problems = await judge(self.sandbox, info.setup, code, info.tests, self.limits, all_or_nothing)
        passed = problems.count("")
        share = passed / len(info.tests)
        told = [f"Environment: {passed} of {len(info.tests)} tests passed.", *filter(None, problems)]
        reward = float(share == 1.0) if self.reward == "all" else share
        return text_outcome(" ".join(told[:2]), reward, terminated=True, answer=code)

    async def _interpreted(self, code: str | None, reply: str, info: CodeInfo) -> StepOutcome:
        if code is None:
            answer = last_box(reply)
            given = (answer or "").strip()
            right = given != "" and given == str(info.ground_truth).strip()
            verdict = "correct" if right else "incorrect"
            return text_outcome(f"Environment: {verdict}.", float(right), terminated=True, answer=answer)
        if len(info.cells) == _MOST_CELLS or len(code) > _LARGEST_CELL:
            limits = f"at most {_MOST_CELLS} blocks of {_LARGEST_CELL} characters can be run in one rollout"
            return text_outcome(f"The code was not run: {limits}.")
        cells = json.dumps([info.setup, *info.cells, code]).encode("utf-8", "surrogatepass")
        outcome = await self.sandbox.run(Program(_RUN_CELLS), {"cells.json": cells}, self.limits)
        output = outcome.stdout + outcome.stderr
        if len(output) > _LONGEST_OUTPUT:
            output = f"{output[: _LONGEST_OUTPUT // 2]}\n[...]\n{output[-_LONGEST_OUTPUT // 2 :]}"
        if outcome.ended_by != "exit":
            # What reached a limit once would do so in each later turn.
            ending = f"The code {ENDED_BY[outcome.ended_by]}. It has no effect on later code."
            return text_outcome(f"{output}\n{ending}".strip())
        return text_outcome(output.strip() if output else "(no output)", metadata=info.with_cell(code))

    def close(self) -> None:
        """Ends the sandbox."""
        self.sandbox.close()

    def example_samples(self, count: int, seed: int) -> list[dict[str, Any]]:
        """Functions of one number to write, all different."""
        draw = random.Random(seed)
        largest = max(99, count)
        return [_function_sample(*divmod(number, largest)) for number in draw.sample(range(largest**2), count)]


def _function_sample(factor: int, summand: int) -> dict[str, Any]:
    """A linear function to write, with three tests."""
    prompt = f"Write a Python function f(x) that returns {factor} * x + {summand}. Reply with one code block."
    tests = [{"call": f"f({x})", "expected": factor * x + summand} for x in (0, 1, -7)]
    return {"messages": [{"role": "user", "content": prompt}], "extra_env_info": {"tests": tests}}
