"""The `extra_env_info` of a sample of `code`."""

from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

Source = Annotated[str, Field(max_length=65536)]


class InputOutputTest(BaseModel):
    """The program reads `stdin` and must print `stdout`. Spaces at the ends of lines and around all are ignored."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    stdin: Source = ""
    stdout: Source


class CallTest(BaseModel):
    """An expression that calls what the program defines must have the value `expected`, as JSON has it."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    call: Source
    """Such as `add(1, 2)`."""
    expected: JsonValue
    """Tuples are lists. Floats may differ by a billionth of their value."""


class CodeTest(BaseModel):
    """Python that raises if the program is wrong, such as `assert add(1, 2) == 3`."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    code: Source


Test = InputOutputTest | CallTest | CodeTest


class CodeInfo(BaseModel):
    """Either `tests`, or `ground_truth` for a rollout with an interpreter; further fields are ignored."""

    model_config = ConfigDict(extra="ignore", use_attribute_docstrings=True)

    tests: Annotated[list[Test], Field(max_length=1000)] = []
    """What the program of the reply must do."""
    setup: Source = ""
    """Python that is run before the program: imports, or the beginning of a function that the reply completes."""
    ground_truth: str | None = None
    """The answer that the last reply must give as `\\boxed{...}`, when its other replies run code."""
    cells: Annotated[list[Source], Field(max_length=64)] = []
    """The code of the rollout so far; part of its state."""

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if bool(self.tests) == (self.ground_truth is not None):
            raise ValueError("give either tests or ground_truth")
        return self

    def with_cell(self, cell: str) -> dict[str, Any]:
        """The next state, as JSON."""
        return {**self.model_dump(exclude_defaults=True), "cells": [*self.cells, cell]}
