"""The task `code`: the model's Python against given tests, run in a sandbox.

`SandboxSettings` says which sandbox (`deployments/sandbox`) runs the programs, and what a run may use.
"""

import json
import random
import secrets
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from deployments.sandbox import Limits, LocalSandbox, Outcome, Program, Sandbox, SandboxLost, WallName
from deployments.tasks.replies import last_code_block, text_outcome
from deployments.tasks.support import assigned_cores, json_equal
from rollout_env import ChatMessage, Reference, StepOutcome, TaskEnvironment, TemporaryFailure, reply_text

_Source = Annotated[str, Field(max_length=65536)]


class InputOutputTest(BaseModel):
    """The program reads `stdin` and must print `stdout`. Spaces at the ends of lines and around all are ignored."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    stdin: _Source = ""
    stdout: _Source


class CallTest(BaseModel):
    """An expression that calls what the program defines must have the value `expected`, as JSON has it."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    call: _Source
    """Such as `add(1, 2)`."""
    expected: JsonValue
    """Tuples are lists. Floats may differ by a billionth of their value."""


class CodeTest(BaseModel):
    """Python that raises if the program is wrong, such as `assert add(1, 2) == 3`."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    code: _Source


_Test = InputOutputTest | CallTest | CodeTest


class CodeInfo(BaseModel):
    """The `extra_env_info` of a sample; further fields are ignored."""

    model_config = ConfigDict(extra="ignore", use_attribute_docstrings=True)

    tests: Annotated[list[_Test], Field(min_length=1, max_length=1000)]
    """Tests of the reply's program."""
    setup: _Source = ""
    """Python that is run before the program: imports, or the beginning of a function that the reply completes."""


_RUN_TESTS = (Path(__file__).parent / "programs" / "run_tests.py").read_text(encoding="utf-8")
_BLOCK = "```python\n{}\n```"
_SHOWN = 300
"""Characters of a test's result that are shown."""
_ENDED_BY = {
    "time": "took too long",
    "processor_time": "used too much processor time",
    "memory": "used too much memory",
    "output": "printed too much",
}


async def _judge(
    sandbox: Sandbox, setup: str, code: str, tests: Sequence[_Test], limits: Limits, all_or_nothing: bool
) -> list[str]:
    """Judges the tests in order; `limits` hold for all tests of a kind together, or for each with a `stdin`.

    Args:
        all_or_nothing: tests after one that failed may be left out.

    Returns:
        for each test a sentence about its failure, empty if it passed, but for those at the end that were left out:
            also those after one that reached a limit.

    Raises:
        SandboxLost: the sandbox failed.
    """
    program = f"{setup}\n{code}" if setup else code
    problems: list[str] = []
    for reads_input, group in groupby(tests, key=lambda test: isinstance(test, InputOutputTest)):
        for together in [[test] for test in group] if reads_input else [list(group)]:
            outcome, judged = await _judge_together(sandbox, program, together, limits)
            problems += judged
            if outcome.ended_by != "exit" or (all_or_nothing and any(judged)):
                return problems
    return problems


def _problem_of_output(outcome: Outcome, test: InputOutputTest) -> str:
    if outcome.ended_by != "exit":
        return f"The program {_ENDED_BY[outcome.ended_by]}."
    if outcome.exit_code != 0:
        return f"The program failed: {_last_line(outcome.stderr)}"
    if _normalized(outcome.stdout) != _normalized(test.stdout):
        return f"The program printed {outcome.stdout[:_SHOWN]!r}, expected {test.stdout[:_SHOWN]!r}."
    return ""


async def _judge_together(
    sandbox: Sandbox, program: str, tests: Sequence[_Test], limits: Limits
) -> tuple[Outcome, list[str]]:
    """Runs the program once: for one test with an input, or for any number without. The problems end with the test that
    reached a limit."""
    if isinstance(test := tests[0], InputOutputTest):
        outcome = await sandbox.run(Program(program, stdin=test.stdin), {}, limits)
        return outcome, [_problem_of_output(outcome, test)]
    inside = [test for test in tests if not isinstance(test, InputOutputTest)]
    token = secrets.token_hex(16)
    # What is expected stays here.
    asked = [{"call": test.call} if isinstance(test, CallTest) else {"code": test.code} for test in inside]
    spec = ascii({"code": program, "tests": asked}).encode()
    outcome = await sandbox.run(Program(_RUN_TESTS, stdin=f"{token}\n"), {"tests.literal": spec}, limits)
    results = _reported(outcome.stdout, token)
    problems = [_problem_of_result(results[number], test) for number, test in enumerate(inside) if number in results]
    if len(problems) < len(inside):
        what = _ENDED_BY.get(outcome.ended_by, "ended the tests")
        problems.append(f"The program {what}.")
    return outcome, problems


def _reported(stdout: str, token: str) -> dict[int, dict[str, Any]]:
    """The results by the number of the test. The first one counts: another is not the tests' own."""
    results: dict[int, dict[str, Any]] = {}
    for line in stdout.splitlines():
        parts = line.split(" ", 2)
        if len(parts) == 3 and parts[0] == token and parts[1].isdigit():
            try:
                result = json.loads(parts[2])
            except ValueError:
                continue
            if isinstance(result, dict):
                results.setdefault(int(parts[1]), result)
    return results


def _problem_of_result(result: dict[str, Any], test: CallTest | CodeTest) -> str:
    if "value" not in result:
        return f"{_shown(test)} failed: {str(result.get('error'))[:_SHOWN]}."
    if isinstance(test, CallTest) and not json_equal(result["value"], test.expected):
        return f"{_shown(test)} gave {result['value']!r:.{_SHOWN}}, expected {test.expected!r:.{_SHOWN}}."
    return ""


def _shown(test: CallTest | CodeTest) -> str:
    return (test.call if isinstance(test, CallTest) else test.code)[:_SHOWN]


def _normalized(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


def _last_line(stderr: str) -> str:
    lines = stderr.strip().splitlines()
    return lines[-1][:_SHOWN] if lines else "it wrote no error."


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


class CodeEnvironment(TaskEnvironment):
    """One turn: the code block of the reply is run against the tests.

    Of several blocks the last one that is marked as Python counts, or where none is, the last one without a language.
    """

    description: ClassVar[str] = "Python programs against given tests."
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
        info, code = extra_env_info, last_code_block(reply_text(message_log[-1]))
        if code is None:
            return text_outcome("Environment: the reply has no code block.", terminated=True)
        all_or_nothing = self.reward == "all"
        try:
            problems = await _judge(self.sandbox, info.setup, code, info.tests, self.limits, all_or_nothing)
        except SandboxLost as error:
            raise TemporaryFailure(f"The sandbox failed: {error}") from error
        passed = problems.count("")
        share = passed / len(info.tests)
        told = [f"Environment: {passed} of {len(info.tests)} tests passed.", *filter(None, problems)]
        reward = float(share == 1.0) if all_or_nothing else share
        return text_outcome(" ".join(told[:2]), reward, terminated=True, answer=code)

    def close(self) -> None:
        """Ends the sandbox."""
        self.sandbox.close()

    def reference(self, sample: Mapping[str, Any]) -> Reference:
        """The program under `solution` of the fields, where they have one."""
        solution = sample["extra_env_info"].get("solution")
        return Reference(None if solution is None else [_BLOCK.format(solution)], program=_BLOCK.format)

    def example_samples(self, count: int, seed: int) -> list[dict[str, Any]]:
        """Functions of one number to write, all different."""
        draw = random.Random(seed)
        largest = max(99, count)
        return [_function_sample(*divmod(number, largest)) for number in draw.sample(range(largest**2), count)]


def _function_sample(factor: int, summand: int) -> dict[str, Any]:
    """A linear function to write, with three tests."""
    prompt = f"Write a Python function f(x) that returns {factor} * x + {summand}. Reply with one code block."
    tests = [{"call": f"f({x})", "expected": factor * x + summand} for x in (0, 1, -7)]
    solution = f"def f(x):\n    return {factor} * x + {summand}"
    return {"messages": [{"role": "user", "content": prompt}], "extra_env_info": {"tests": tests, "solution": solution}}
