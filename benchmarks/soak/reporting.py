"""What both soak programs show: a bar while they run, and at the end the problems and the figures."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

MOST_SHOWN = 10


@contextmanager
def rounds_shown(console: Console, rounds: int) -> Iterator[Callable[[str], None]]:
    """Gives a function that counts one round as done, with what is to be said of all so far."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.description}"), console=console) as progress:
        bar = progress.add_task("", total=rounds)
        yield lambda description: progress.update(bar, advance=1, description=description)


def finish(console: Console, problems: Sequence[str], figures: Mapping[str, object]) -> None:
    """Prints the first problems, and as the last line the figures and the number of problems, as JSON.

    Raises:
        typer.Exit: there are problems; the exit code is 1.
    """
    for problem in problems[:MOST_SHOWN]:
        console.print(problem, style="red", markup=False, highlight=False, soft_wrap=True)
    typer.echo(json.dumps({**figures, "problems": len(problems)}))
    if problems:
        raise typer.Exit(1)
