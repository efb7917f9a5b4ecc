"""What the programs of endurance share: options, services that end, a file of results, and the last line."""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import typer
from rich.console import Console

from benchmarks.process_group import no_process_left
from service.startup.local_service import sentences_for_the_user

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

MOST_SHOWN = 10
Result = TypeVar("Result", bound="DataclassInstance")
console = Console(stderr=True)


def listed(text: str, known: Collection[str]) -> list[str]:
    """The names in an option that has commas between them. Raises `typer.BadParameter` for an unknown one."""
    names = text.split(",")
    if unknown := set(names) - set(known):
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}: there are only {', '.join(known)}")
    return names


@contextmanager
def ended_services() -> Iterator[None]:
    """No process of a service that the block runs is left, and why one does not start is said in a sentence."""
    with sentences_for_the_user(console), no_process_left():
        yield


def append(path: Path, result: "DataclassInstance") -> None:
    """Writes a result as one more line of JSON into the file of all runs."""
    with path.open("a") as file:
        file.write(json.dumps(asdict(result)) + "\n")


def read(path: Path, kind: type[Result]) -> list[Result]:
    """The results of all runs; none if there is no file yet."""
    return [kind(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def finish(problems: Sequence[str], figures: Mapping[str, object]) -> None:
    """Prints the first problems, and as the last line the figures and the number of problems, as JSON.

    Raises:
        typer.Exit: there are problems; the exit code is 1.
    """
    for problem in problems[:MOST_SHOWN]:
        console.print(problem, style="red", markup=False, highlight=False, soft_wrap=True)
    typer.echo(json.dumps({**figures, "problems": len(problems)}))
    if problems:
        raise typer.Exit(1)
