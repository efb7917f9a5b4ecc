"""Tests of a program: their forms in `extra_env_info`, running them in a sandbox, and their verdicts."""

import json
import secrets
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

from deployments.sandbox import Limits, Outcome, Program, Sandbox
from deployments.tasks.support import json_equal

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
    """Either `tests`, or `ground_truth` for a rollout with an interpreter; further fields are ignored."""

    model_config = ConfigDict(extra="ignore", use_attribute_docstrings=True)

    tests: Annotated[list[_Test], Field(max_length=1000)] = []
    """Tests of the reply's program."""
    setup: _Source = ""
    """Python that is run before the program: imports, or the beginning of a function that the reply completes."""
    ground_truth: str | None = None
    """The answer that the last reply must give as `\\boxed{...}`, when its other replies run code."""
    cells: Annotated[list[_Source], Field(max_length=64)] = []
    """The code of the rollout so far; part of its state."""

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if bool(self.tests) == (self.ground_truth is not None):
            raise ValueError("give either tests or ground_truth")
        return self

    def with_cell(self, cell: str) -> dict[str, Any]:
        """The next state, as JSON."""
        return {**self.model_dump(exclude_defaults=True), "cells": [*self.cells, cell]}


_RUN_TESTS = (Path(__file__).parent / "programs" / "run_tests.py").read_text(encoding="utf-8")
_SHOWN = 300
"""Characters of a test's result that are shown."""
ENDED_BY = {
    "time": "took too long",
    "processor_time": "used too much processor time",
    "memory": "used too much memory",
    "output": "printed too much",
}


async def judge(
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
        return f"The program {ENDED_BY[outcome.ended_by]}."
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
        what = ENDED_BY.get(outcome.ended_by, "ended the tests")
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
