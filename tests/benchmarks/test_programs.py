"""`python -m benchmarks` and `python -m tests.endurance` list their programs and run one by its name."""

import sys
from collections.abc import Mapping
from importlib.util import find_spec

import pytest

from benchmarks import __main__ as benchmarks
from benchmarks.programs import Program, run_program
from tests.endurance import __main__ as endurance

PROGRAMS = {"swap": Program("benchmarks.weight_swap", "how long"), "a": Program("b.c", "why", {"RAY": "1"})}


@pytest.mark.parametrize(
    ("arguments", "said", "status"),
    [
        ([], "", 0),
        (["--help"], "", 0),
        (["b"], "benchmarks has no program 'b'. There are:\n", 2),
    ],
)
def test_without_a_known_name_all_programs_are_listed(arguments: list[str], said: str, status: int) -> None:
    written: list[str] = []
    assert run_program("benchmarks", PROGRAMS, arguments, written.append) == status
    listed = "  swap  how long\n  a     why\nOptions: python -m benchmarks NAME --help\n"
    assert "".join(written) == f"{said}{listed}"


def test_a_program_gets_the_other_arguments_and_its_variables() -> None:
    executed: list[tuple[str, list[str], Mapping[str, str]]] = []
    run_program("benchmarks", PROGRAMS, ["a", "--rounds", "2"], execute=lambda *call: executed.append(call))
    [(file, command, environment)] = executed
    assert (file, command) == (sys.executable, [sys.executable, "-m", "b.c", "--rounds", "2"])
    assert environment["RAY"] == "1"


@pytest.mark.parametrize("programs", [benchmarks.PROGRAMS, endurance.PROGRAMS])
def test_each_program_is_there(programs: Mapping[str, Program]) -> None:
    assert [program.module for program in programs.values() if find_spec(program.module) is None] == []
