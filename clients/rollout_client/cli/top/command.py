"""`rollout top`: the state of a service, polled, as tables for a terminal of 80 columns.

A value that is not known is a dash.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing, nullcontext, suppress
from typing import Annotated, Any

import typer
from pydantic import BaseModel
from rich.box import SIMPLE
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rollout_client.calls.options import DEFAULT_URL
from rollout_client.cli.commands.service import degraded_rows
from rollout_client.cli.options import ApiKeyFile, Connection, Url, command
from rollout_client.cli.output import FAILED, AsJson, fact_table, out, plain
from rollout_client.cli.top.readings import views
from rollout_client.cli.top.view import PolicyView, TopView

UNKNOWN = "-"
MINUTE_S, HOUR_S, DAY_S = 60, 3600, 86400


def top_tables(view: TopView, url: str) -> Group:
    generators = [table_of(GENERATOR_COLUMNS, view.generators)] if view.generators else []
    tasks = [table_of(TASK_COLUMNS, view.tasks)] if view.tasks else []
    return Group(service_table(view, url), *generators, *tasks)


def service_table(view: TopView, url: str) -> Table:
    rows: list[tuple[str, str | Text]] = [
        ("service", plain(url if view.model is None else f"{url}, {view.model}")),
        ("ready", plain(*readiness_text(view))),
        *degraded_rows(view.degraded),
    ]
    if not view.is_answering:
        return fact_table(rows)
    turns = f"{rate_text(view.turns_per_s)} turns/s, {percent_text(view.clipped_ratio)} clipped by their length"
    hits = f"prefix cache hits {percent_text(view.prefix_cache_hits)}"
    return fact_table(
        [
            *rows,
            ("replicas", plain(", ".join(f"{name} {count}" for name, count in view.replicas.items()) or UNKNOWN)),
            *(("policy", plain(policy_text(policy))) for policy in view.policies),
            ("rollouts", f"{count_text(view.in_flight)} in flight, {rate_text(view.rollouts_per_s)}/s"),
            ("generations", f"{count_text(view.waiting)} waiting, {turns}"),
            ("tokens", f"{rate_text(view.tokens_per_s)}/s, {hits}"),
            ("rates", "from the second look on" if view.span_s is None else f"means over {view.span_s:.0f} s"),
        ]
    )


def readiness_text(view: TopView) -> tuple[str, str]:
    """With its style."""
    if not view.is_answering:
        return f"no answer for {duration_text(view.silent_s)}: {view.reason}", "red"
    return ("yes", "green") if view.is_ready else (f"no: {view.reason}", "red")


def policy_text(policy: PolicyView) -> str:
    name = f"{policy.name} " if policy.name else ""
    return f"{name}version {policy.version} for {duration_text(policy.age_s)}"


def table_of(columns: Sequence[tuple[str, str, Callable[[Any], str | Text]]], views: Sequence[BaseModel]) -> Table:
    """A row for each of `views`. Columns are a heading, the name of a field, and how its value is shown."""
    table = Table(box=SIMPLE, pad_edge=False, collapse_padding=True)
    (first, _, _), *others = columns
    table.add_column(first, overflow="fold")
    for heading, _, _ in others:
        table.add_column(heading, justify="right", no_wrap=True)
    for view in views:
        table.add_row(*(shown(getattr(view, field)) for _, field, shown in columns))
    return table


def count_text(value: int | None) -> str:
    return UNKNOWN if value is None else f"{value:,}"


def rate_text(value: float | None) -> str:
    """Three digits are enough: a rate is that of the last seconds."""
    if value is None:
        return UNKNOWN
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def percent_text(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    return f"{value:.0%}" if value >= 0.1 or value == 0 else f"{value:.1%}"


def duration_text(seconds: float | None) -> str:
    """Its two largest units: `45 s`, `3 min 20 s`, `2 h 5 min`, `4 d 1 h`."""
    if seconds is None:
        return UNKNOWN
    return " ".join(parts_of_duration(round(seconds))) or "0 s"


def parts_of_duration(seconds: int) -> Iterator[str]:
    units = [(DAY_S, "d"), (HOUR_S, "h"), (MINUTE_S, "min"), (1, "s")]
    place = next((place for place, (unit_s, _) in enumerate(units) if seconds >= unit_s), len(units))
    for unit_s, name in units[place : place + 2]:
        if count := seconds // unit_s:
            yield f"{count} {name}"
        seconds %= unit_s


GENERATOR_COLUMNS = (
    ("generator", "replica_id", plain),
    ("version", "version", count_text),
    ("tokens/s", "tokens_per_s", rate_text),
    ("hits", "prefix_cache_hits", percent_text),
    ("KV cache", "kv_cache_usage", percent_text),
    ("running", "running", count_text),
    ("waiting", "waiting", count_text),
)
TASK_COLUMNS = (
    ("task", "task_name", plain),
    ("rollouts/s", "rollouts_per_s", rate_text),
    ("turns/s", "turns_per_s", rate_text),
    ("clipped", "clipped_ratio", percent_text),
    ("tokens/s", "tokens_per_s", rate_text),
    ("reward", "mean_reward", lambda reward: UNKNOWN if reward is None else f"{reward:.3f}"),
    ("failed/s", "failed_calls_per_s", rate_text),
)
DEFAULT_INTERVAL_S = 2.0
DEFAULT_WINDOW_S = 30.0
"""A service's counters are up to ten seconds old, and then jump: over three jumps a mean is steady enough."""


@command
def top(
    interval_s: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = DEFAULT_INTERVAL_S,
    window_s: Annotated[float, typer.Option(min=0.1, help="Seconds of which rates are means.")] = DEFAULT_WINDOW_S,
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
            Connection(url, api_key_file, retries=0).async_client() as client,
            aclosing(views(client, window_s, interval_s, 1 if once else count)) as seen,
        ):
            with Live(console=out(), auto_refresh=False) if is_live else nullcontext() as live:
                async for view in seen:
                    if as_json:
                        typer.echo(view.model_dump_json(exclude_none=True))
                    elif live is None:
                        out().print(top_tables(view, client.base_url))
                    else:
                        live.update(top_tables(view, client.base_url), refresh=True)
        return view

    # Without a terminal the views are printed one after the other.
    is_live = out().is_terminal and not as_json
    with suppress(KeyboardInterrupt):
        last = asyncio.run(watch())
        if last is None or not last.is_ready:
            raise typer.Exit(FAILED)
