"""What a command prints: tables for a reader, or with `--json` one JSON document for a program."""

from typing import Annotated, Any

import typer
from pydantic_core import to_json
from rich.console import Console, RenderableType

out = Console()
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document in place of tables.")]


def show(document: Any, as_json: bool, *renderables: RenderableType) -> None:
    """Prints `document`, anything that pydantic makes JSON of, or else `renderables`."""
    if as_json:
        typer.echo(to_json(document, indent=1, exclude_none=True, inf_nan_mode="null"))
        return
    for renderable in renderables:
        out.print(renderable)
