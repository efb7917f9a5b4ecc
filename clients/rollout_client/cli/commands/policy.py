"""`rollout policy` and `rollout push`: which weights are served, how others replace them, and the tables of both."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group, JustifyMethod
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
RIGHT = frozenset({"version", "base", "size"})
WHOLE = frozenset({"version", "base", "checksum"})
"""Columns that are not folded on a narrow terminal."""


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


def versions_table(state: PolicyState) -> Table:
    updating = "" if state.updating_to is None else f", updating to {state.updating_to}"
    table = weights_table(f"Version {state.current} is current{updating}", "version", "kind", "base")
    for info in state.versions:
        base = "" if info.base is None else str(info.base)
        style = "bold" if info.version == state.current else ""
        table.add_row(str(info.version), info.kind, base, size_of(info), *ending(info), style=style)
    return table


def named_table(named: Sequence[NamedPolicyState]) -> Table:
    table = weights_table("Named policies", "name", "version", "base")
    for policy in named:
        updating = "" if policy.updating_to is None else f",\nupdating to {policy.updating_to}"
        version = ("none" if policy.current is None else str(policy.current)) + updating
        base = "" if policy.base is None else str(policy.base)
        size = decimal(policy.size_bytes) if policy.size_bytes else ""
        table.add_row(plain(policy.name), version, base, size, *ending(policy))
    return table


def weights_table(title: str, *columns: str) -> Table:
    """A table with these columns, and with those that all weights have."""
    table = Table(title=title, title_justify="left")
    for name in (*columns, "size", "created", "checksum"):
        justify: JustifyMethod = "right" if name in RIGHT else "left"
        table.add_column(name, justify=justify, overflow="fold", no_wrap=name in WHOLE)
    return table


def ending(weights: VersionInfo | NamedPolicyState) -> tuple[str, str]:
    """The cells `created` and `checksum`."""
    return "" if weights.created_at is None else f"{weights.created_at:{DATE}}", shortened(weights.checksum)


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
            state = client.policy.state(checksums_within)
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
        update = client.policy.rollback(to, version, name, mode=mode)
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
        client.policy.drop(name)
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
