"""`rollout policy` and `rollout push`: which weights are served, how others replace them, and the tables of both."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, ConsoleOptions, Group, JustifyMethod, RenderResult
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from rollout_client.cli.options import Connection, command
from rollout_client.cli.output import AsJson, plain, show
from rollout_client.contract.policy import (
    FollowState,
    NamedPolicyState,
    PauseMode,
    PolicyState,
    PolicyUpdate,
    PushResult,
    VersionInfo,
    WeightsKind,
)

SHOWN_DIGITS = 12
DATE = "%Y-%m-%d %H:%M:%S"


def policy_tables(state: PolicyState) -> Group:
    """The versions that the service has, its named policies if there are any, what its replicas have loaded, and the
    folder that it follows, if it does."""
    named = [named_table(state.named)] if state.named else []
    followed = [] if state.follow is None else [followed_lines(state.follow)]
    return Group(versions_table(state), *named, replicas_table(state), *followed)


def followed_lines(follow: FollowState) -> Text:
    lines = [f"Follows {follow.folder}: version {follow.taken} of {follow.newest} is taken"]
    lines += [] if follow.waiting is None else [f"Waits: {follow.waiting}"]
    lines += [f"Version {refused.version} is refused: {refused.reason}" for refused in follow.refused]
    return Text("\n").join(plain(line) for line in lines)


class WeightsTable:
    """Leaves out columns where a terminal is too narrow for all of them, the least important first.

    A date or a number that is broken over two lines, or cut, is not read.
    """

    DISPENSABLE = (None, "checksum", "base", "kind", "size", "created")
    """First none of them."""
    FOLDED: Mapping[str, int] = {"name": 8, "size": 8}
    """Least width of the lines of columns that may be broken."""
    RIGHT = frozenset({"version", "base", "size"})

    def __init__(self, title: str) -> None:
        self._title = title
        self._rows: list[tuple[dict[str, str], str]] = []

    def add(self, style: str = "", **cells: str) -> None:
        """All rows have cells of the same columns."""
        self._rows.append((cells, style))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = list(self._rows[0][0]) if self._rows else []
        for dispensable in self.DISPENSABLE:
            columns = [name for name in columns if name != dispensable]
            # Beside its text each column has two spaces and a border.
            if sum(self._least_width(name) + 3 for name in columns) + 1 <= options.max_width:
                break
        table = Table(title=self._title, title_justify="left")
        for name in columns:
            justify: JustifyMethod = "right" if name in self.RIGHT else "left"
            least, is_whole = self._least_width(name), name not in self.FOLDED
            table.add_column(name, justify=justify, overflow="fold", no_wrap=is_whole, min_width=least)
        for cells, style in self._rows:
            table.add_row(*(plain(cells[name]) for name in columns), style=style)
        yield table

    def _least_width(self, name: str) -> int:
        lines = [name, *(line for cells, _ in self._rows for line in cells[name].splitlines())]
        return self.FOLDED.get(name) or max(map(len, lines))


def versions_table(state: PolicyState) -> WeightsTable:
    updating = "" if state.updating_to is None else f", updating to {state.updating_to}"
    table = WeightsTable(f"Version {state.current} is current{updating}")
    for info in state.versions:
        table.add(
            "bold" if info.version == state.current else "",
            version=str(info.version),
            kind=info.kind,
            base="" if info.base is None else str(info.base),
            size=size_of(info),
            created="" if info.created_at is None else f"{info.created_at:{DATE}}",
            checksum=shortened(info.checksum),
        )
    return table


def named_table(named: Sequence[NamedPolicyState]) -> WeightsTable:
    table = WeightsTable("Named policies")
    for policy in named:
        updating = "" if policy.updating_to is None else f",\nupdating to {policy.updating_to}"
        table.add(
            name=policy.name,
            version=("none" if policy.current is None else str(policy.current)) + updating,
            base="" if policy.base is None else str(policy.base),
            size=decimal(policy.size_bytes) if policy.size_bytes else "",
            created="" if policy.created_at is None else f"{policy.created_at:{DATE}}",
            checksum=shortened(policy.checksum),
        )
    return table


def size_of(info: VersionInfo) -> str:
    size = decimal(info.size_bytes) if info.size_bytes else ""
    return size if info.delta_bytes is None else f"{size} (delta: {decimal(info.delta_bytes)})"


def replicas_table(state: PolicyState) -> Table:
    table = Table(title="Replicas", title_justify="left")
    table.add_column("replica", overflow="fold")
    table.add_column("version", justify="right")
    table.add_column("checksum")
    for replica in state.replicas:
        table.add_row(plain(replica.replica_id), str(replica.version), shortened(replica.checksum))
    return table


def update_table(update: PolicyUpdate) -> Table:
    """The result of an update on each replica, with its times in seconds."""
    took = f", {decimal(update.sent_bytes)} sent, {update.push_s:.2f} s" if isinstance(update, PushResult) else ""
    over = "" if update.base is None else f" on the full weights of version {update.base}"
    lines = [f"Version {update.label} is current{over}{took}", *update.warnings]
    table = Table(title=Text("\n").join(map(plain, lines)), title_justify="left")
    table.add_column("replica", overflow="fold")
    table.add_column("status")
    for name in ("load s", "swap s", "pause s", "canary s"):
        table.add_column(name, justify="right")
    for replica in update.replicas:
        seconds = (f"{value:.3f}" for value in (replica.load_s, replica.swap_s, replica.pause_s, replica.canary_s))
        status = replica.status if replica.error is None else f"{replica.status}: {replica.error}"
        table.add_row(plain(replica.replica_id), plain(status), *seconds)
    return table


def shortened(checksum: str | None) -> str:
    return (checksum or "")[:SHOWN_DIGITS]


policy_app = typer.Typer(invoke_without_command=True)


@policy_app.callback()
@command
def policy(
    context: typer.Context,
    service: Connection,
    checksums_within: Annotated[
        float,
        typer.Option(min=0, help="Have the replicas compute their checksums; seconds to wait for them."),
    ] = 0.0,
    as_json: AsJson = False,
) -> None:
    """Show which weights the service serves, and what each of its replicas has loaded."""
    if context.invoked_subcommand is None:
        with service.client() as client:
            state = client.policy(checksums_within)
        show(state, as_json, policy_tables(state))


@policy_app.command()
@command
def rollback(
    to: Annotated[int, typer.Argument(min=0, help="A version whose weights the service still has.")],
    service: Connection,
    version: Annotated[int | None, typer.Option(min=1, help="By default one more than the newest.")] = None,
    mode: Annotated[PauseMode, typer.Option(help="What becomes of generations under way.")] = "keep",
    name: Annotated[
        str | None, typer.Option(help="Serve the adapter of version TO as this named policy; the weights stay.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make the weights of version TO current again, as a new version."""
    with service.client() as client:
        update = client.rollback(to, version, name, mode=mode)
    show(update, as_json, update_table(update))


@policy_app.command()
@command
def drop(
    name: Annotated[str, typer.Argument(help="A named policy; `rollout policy` lists them.")],
    service: Connection,
    as_json: AsJson = False,
) -> None:
    """Serve the policy NAME no longer. Its next version has the next number."""
    with service.client() as client:
        client.drop_policy(name)
    show({"dropped": name}, as_json, plain(f"{name} is served no longer."))


@command
def push(
    path: Annotated[Path, typer.Argument(help="A .safetensors file, a checkpoint's folder, or an adapter's of PEFT.")],
    service: Connection,
    version: Annotated[int | None, typer.Option(min=1, help="By default one more than the newest.")] = None,
    kind: Annotated[WeightsKind, typer.Option(help="What the weights are.")] = "full",
    base: Annotated[
        int | None, typer.Option(help="The version that a delta changes, or that an adapter was trained on.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="The named policy that an adapter becomes a version of.")] = None,
    mode: Annotated[PauseMode, typer.Option(help="What becomes of generations under way.")] = "keep",
    as_json: AsJson = False,
) -> None:
    """Upload the weights at PATH and have every replica serve them."""
    with service.client() as client:
        update = client.push_weights(path, version, kind=kind, base=base, name=name, mode=mode, progress=True)
    show(update, as_json, update_table(update))
