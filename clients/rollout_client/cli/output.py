"""Output of a command: tables for a reader, or with `--json` one JSON document for a program.

A failure is one sentence on stderr and an exit code.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from pydantic_core import to_json
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from rollout_client.errors import RolloutError

VISIBLE_CONTROLS = (
    {code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\n\t"}
    | {0x7F: "\u2421"}
    | dict.fromkeys(range(0x80, 0xA0), "\ufffd")
)
"""An escape sequence in a model's text must not reach the terminal."""
FAILED = 1
TOO_MANY_ERRORS = 3
"""More rollouts failed than `--max-error-rate` allows. 2 is what typer ends with for wrong arguments."""


def table(title: str | Text, columns: Iterable[str], rows: Iterable[tuple[Any, ...]]) -> Table:
    """A table. The columns whose names begin with `>` hold numbers: they are right-aligned and not folded."""
    made = Table(title=title, title_justify="left")
    for name in columns:
        is_number = name.startswith(">")
        made.add_column(name.lstrip(">"), justify="right" if is_number else "left", overflow="fold", no_wrap=is_number)
    for row in rows:
        made.add_row(*row)
    return made


def value_table(title: str, rows: Iterable[tuple[str | Text, str]]) -> Table:
    """A table of names with their values."""
    return table(title, ("name", ">value"), rows)


def fact_table(rows: Iterable[tuple[str | Text, str | Text]]) -> Table:
    """A table of facts without a heading, long ones over several lines."""
    table = Table(show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, fact in rows:
        table.add_row(name, fact)
    return table


@contextmanager
def errors_as_sentences() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        # The reader has closed the pipe, as `| head` does: typer ends the command without a message.
        raise
    except (OSError, RolloutError, ValueError, ModuleNotFoundError) as error:
        of_file = error if isinstance(error, OSError) and error.filename else None
        sentence = str(error) if of_file is None else f"{of_file.filename}: {of_file.strerror}"
        typer.secho(sentence, err=True, fg=typer.colors.RED)
        raise typer.Exit(FAILED) from error


def out() -> Console:
    """A console as wide as the terminal is now: rich reads `COLUMNS` when it makes one."""
    return Console()


AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document in place of tables.")]


def show(document: Any, as_json: bool, *renderables: RenderableType) -> None:
    """Prints `document`, anything that pydantic makes JSON of, or else `renderables`."""
    if as_json:
        typer.echo(to_json(document, indent=1, exclude_none=True, inf_nan_mode="null"))
        return
    for renderable in renderables:
        out().print(renderable)


def check_error_rate(error_rate: float, max_error_rate: float) -> None:
    if error_rate > max_error_rate:
        raise typer.Exit(TOO_MANY_ERRORS)


def number(value: float) -> str:
    """Whole numbers without decimals, others with three."""
    return f"{value:,.0f}" if value == int(value) else f"{value:,.3f}"


def plain(text: str, style: str = "") -> Text:
    return Text(text.translate(VISIBLE_CONTROLS), style)
