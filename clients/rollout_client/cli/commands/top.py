"""`rollout top`: how a service is doing, again and again."""

import asyncio
from contextlib import aclosing, nullcontext, suppress
from typing import Annotated

import typer
from rich.live import Live

from rollout_client.base_url import DEFAULT_URL
from rollout_client.cli.errors import FAILED, errors_as_sentences
from rollout_client.cli.options import ApiKeyFile, Url, async_client_of
from rollout_client.cli.output import AsJson, out
from rollout_client.cli.top.command import top_tables
from rollout_client.cli.top.readings import views
from rollout_client.cli.top.view import TopView

DEFAULT_INTERVAL_S = 2.0
DEFAULT_WINDOW_S = 30.0
"""A service's counters are up to ten seconds old, and then jump: over three jumps a mean is steady enough."""


def top(
    interval_s: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = DEFAULT_INTERVAL_S,
    window_s: Annotated[float, typer.Option(min=0.1, help="Rates are means over so many seconds.")] = DEFAULT_WINDOW_S,
    count: Annotated[int, typer.Option(min=0, help="Looks before it ends; 0 goes on until Ctrl-C.")] = 0,
    once: Annotated[bool, typer.Option("--once", help="As --count 1: one look, at once. Rates need a second.")] = False,
    url: Url = DEFAULT_URL,
    api_key_file: ApiKeyFile = None,
    as_json: AsJson = False,
) -> None:
    """Show replicas, what is in flight and waits, tokens, turns and rollouts a second, and the age of the weights.

    Goes on until Ctrl-C, also while the service is away. Rates come with the second look: a service's counters are up
    to ten seconds old, so `--count 2 --interval-s 10` ends with them. With `--json`, a JSON object a line,
    one for each look. With `--count` or `--once` the exit code is 1 if the last look found no service that is ready.
    """

    async def watch() -> TopView | None:
        view = None
        async with (
            async_client_of(url, api_key_file, 0) as client,
            aclosing(views(client, window_s, interval_s, 1 if once else count)) as seen,
        ):
            with Live(console=out, auto_refresh=False) if is_live else nullcontext() as live:
                async for view in seen:
                    if as_json:
                        typer.echo(view.model_dump_json(exclude_none=True))
                    elif live is None:
                        out.print(top_tables(view, client.base_url))
                    else:
                        live.update(top_tables(view, client.base_url), refresh=True)
        return view

    # Where nobody watches, each look is printed after the one before.
    is_live = out.is_terminal and not as_json
    with errors_as_sentences(), suppress(KeyboardInterrupt):
        last = asyncio.run(watch())
        if last is None or not last.is_ready:
            raise typer.Exit(FAILED)
