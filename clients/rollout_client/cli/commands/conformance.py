"""`rollout conformance`: asks a rollout server for what a trainer relies on, and shows what each check saw."""

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import httpx
import typer
from rich.console import Console

from rollout_client.calls.options import KEY_VARIABLE, key_in_file, service_url, without_password
from rollout_client.cli.conformance_checks import IN_FLIGHT, CheckResult, Result, findings
from rollout_client.cli.output import FAILED, AsJson, errors_as_sentences, plain, show, table

_TIMEOUT_S = 300.0
_COLOURS: Mapping[Result, str] = {"pass": "green", "fail": "red", "not offered": "yellow"}


def conformance(
    url: Annotated[str, typer.Argument(help="The server: this service, vLLM's or SGLang's own, or another one.")],
    api_key_file: Annotated[Path | None, typer.Option(help=f"A file with the key; else {KEY_VARIABLE} has it.")] = None,
    checkpoint: Annotated[
        str | None, typer.Option(help="Folder that the server may read, with weights to change to by /update_weights.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check what a trainer relies on: token ids, log-probabilities, versions, refusals, cancellation.

    The exit code is 1 if a check failed. The weights stay as they are without --checkpoint.
    """
    with errors_as_sentences():
        address, key = service_url(url), key_in_file(api_key_file) or os.environ.get(KEY_VARIABLE)
        headers = {} if key is None else {"authorization": f"Bearer {key}"}

        async def ask() -> list[CheckResult]:
            limits = httpx.Limits(max_connections=2 * IN_FLIGHT)
            async with httpx.AsyncClient(base_url=address, headers=headers, timeout=_TIMEOUT_S, limits=limits) as http:
                with Console(stderr=True).status("meeting the server") as status:
                    return await findings(http, checkpoint, on_begin=status.update)

        try:
            found = asyncio.run(ask())
        except httpx.HTTPError as error:
            raise ValueError(f"{without_password(address)} does not answer: {error}") from error
    rows = [(each.check, plain(each.result, _COLOURS[each.result]), each.saw, each.demanded_by) for each in found]
    show(found, as_json, table(without_password(address), ("check", "result", "saw", "demanded by"), rows))
    if any(finding.result == "fail" for finding in found):
        raise typer.Exit(FAILED)
