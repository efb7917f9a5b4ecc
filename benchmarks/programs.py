"""Programs of a package by their names: `python -m PACKAGE` lists them, `python -m PACKAGE NAME ...` runs one."""

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Program:
    """A module that is run as a program."""

    module: str
    help: str
    """What it does and what of its options, in one line."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that its processes need."""


def run_program(
    package: str,
    programs: Mapping[str, Program],
    arguments: list[str],
    write: Callable[[str], object] = sys.stdout.write,
    execute: Callable[[str, list[str], Mapping[str, str]], object] = os.execve,
) -> int:
    """Becomes the program that `arguments` begin with, with the others as its own.

    Without arguments it lists the programs. Returns the exit status of a call that names none.
    """
    name = arguments[0] if arguments else "--help"
    if name in programs:
        program = programs[name]
        command = [sys.executable, "-m", program.module, *arguments[1:]]
        execute(sys.executable, command, {**os.environ, **program.environment})
    is_help = name in ("--help", "-h")
    if not is_help:
        write(f"{package} has no program {name!r}. There are:\n")
    width = max(map(len, programs)) + 2
    for each, program in programs.items():
        write(f"  {each:<{width}}{program.help}\n")
    write(f"Options: python -m {package} NAME --help\n")
    return 0 if is_help else 2
