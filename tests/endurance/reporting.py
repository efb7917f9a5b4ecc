"""What the soak, fuzz and chaos programs show: a bar while they run, and at the end the problems and the figures."""

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
from rich.table import Table

from tests.endurance.growth import Growth

MOST_SHOWN = 10


@contextmanager
def rounds_shown(console: Console, rounds: int | None) -> Iterator[Callable[[str], None]]:
    """Gives a function that counts one round as done, with what is to be said of all so far.

    Args:
        rounds: how many there will be; `None` if nobody knows.
    """
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.description}"), console=console) as progress:
        bar = progress.add_task("", total=rounds)
        yield lambda description: progress.update(bar, advance=1, description=description)


def show_growth(console: Console, growth: Mapping[str, Growth]) -> None:
    table = Table("held", "second third", "last third", "", title="Medians; bytes in MiB")
    for name, found in growth.items():
        unit = 2**20 if max(found.second, found.last) > 2**20 else 1
        table.add_row(
            name,
            f"{found.second / unit:,.1f}",
            f"{found.last / unit:,.1f}",
            "" if found.is_within_bound else "grows",
        )
    console.print(table)


def growth_figures(growth: Mapping[str, Growth]) -> dict[str, int]:
    return {name: round(found.last - found.second) for name, found in growth.items() if found.last}


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
