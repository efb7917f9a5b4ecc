"""The command `rollout` in this process, and the rows of the tables that it prints."""

from typing import Any

from typer.testing import CliRunner, Result

from rollout_client.cli.app import app


def rollout(service: Any, *arguments: str, columns: int = 120) -> Result:
    """Runs a command against `service`, which has a `url`."""
    return CliRunner().invoke(app, [*arguments, "--url", service.url], env={"COLUMNS": str(columns)})


def rows_of(text: str) -> list[list[str]]:
    """The cells of each row of a table, without its heading."""
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if "│" in line]
