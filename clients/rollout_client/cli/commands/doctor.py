"""`rollout doctor`: what is wrong with an installation."""

from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table

from rollout_client.base_url import DEFAULT_URL
from rollout_client.cli.checks import Finding, Level, findings
from rollout_client.cli.errors import FAILED, errors_as_sentences
from rollout_client.cli.options import ApiKeyFile, Url, client_of
from rollout_client.cli.output import AsJson, show
from rollout_client.cli.transcript import plain

STYLES: dict[Level, str] = {"ok": "green", "note": "dim", "problem": "bold red"}


def doctor(
    url: Url = DEFAULT_URL,
    api_key_file: ApiKeyFile = None,
    offline: Annotated[bool, typer.Option("--offline", help="Do not ask the service.")] = False,
    as_json: AsJson = False,
) -> None:
    """Look for what is wrong with this installation, the machine and the service. The exit code is 1 for a problem."""
    with errors_as_sentences():
        if offline:
            found = list(findings(None))
        else:
            with client_of(url, api_key_file, 0) as client:
                found = list(findings(client))
    show(list(map(asdict, found)), as_json, doctor_table(found))
    if any(finding.level == "problem" for finding in found):
        raise typer.Exit(FAILED)


def doctor_table(found: list[Finding]) -> Table:
    table = Table(show_header=False)
    table.add_column()
    table.add_column(overflow="fold")
    table.add_column(overflow="fold")
    for finding in found:
        level = plain(finding.level, STYLES[finding.level])
        table.add_row(level, plain(finding.subject), plain(finding.message))
    return table
