"""`rollout policy` and `rollout push`: which weights are served, how others replace them, and the tables of both."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from rollout_client.cli.options import Connection, command
from rollout_client.cli.output import AsJson, plain, show, table
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
WEIGHTS = (">size", "created", ">checksum")
"""Columns that all weights have."""


def policy_tables(state: PolicyState) -> Group:
    """The versions that the service has, its named policies if there are any, what its replicas have loaded, and the
    folder that it follows, if it does."""
    versions = [(str(info.version), info.kind, _text_of(info.base), *_cells_of(info)) for info in state.versions]
    replicas = [(plain(each.replica_id), str(each.version), _shortened(each.checksum)) for each in state.replicas]
    title = f"Version {state.current} is current{_updating(state, ', ')}"
    tables: list[Table | Text] = [table(title, (">version", "kind", ">base", *WEIGHTS), versions)]
    if state.named:
        named = [
            (
                plain(each.name),
                (_text_of(each.current) or "none") + _updating(each, ",\n"),
                _text_of(each.base),
                *_cells_of(each),
            )
            for each in state.named
        ]
        tables.append(table("Named policies", ("name", ">version", ">base", *WEIGHTS), named))
    tables.append(table("Replicas", ("replica", ">version", ">checksum"), replicas))
    return Group(*tables, *([] if state.follow is None else [_followed_lines(state.follow)]))


def _updating(policy: PolicyState | NamedPolicyState, before: str) -> str:
    return "" if policy.updating_to is None else f"{before}updating to {policy.updating_to}"


def _cells_of(weights: VersionInfo | NamedPolicyState) -> tuple[str, str, str]:
    """The cells of `WEIGHTS`."""
    size = decimal(weights.size_bytes) if weights.size_bytes else ""
    if isinstance(weights, VersionInfo) and weights.delta_bytes is not None:
        size += f" (delta: {decimal(weights.delta_bytes)})"
    created = "" if weights.created_at is None else f"{weights.created_at:%Y-%m-%d %H:%M:%S}"
    return size, created, _shortened(weights.checksum)


def _followed_lines(follow: FollowState) -> Text:
    lines = [f"Follows {follow.folder}: version {follow.taken} of {follow.newest} is taken"]
    lines += [] if follow.waiting is None else [f"Waits: {follow.waiting}"]
    lines += [f"Version {refused.version} is refused: {refused.reason}" for refused in follow.refused]
    return Text("\n").join(plain(line) for line in lines)


def _update_table(update: PolicyUpdate) -> Table:
    """The result of an update on each replica, with its times in seconds."""
    took = f", {decimal(update.sent_bytes)} sent, {update.push_s:.2f} s" if isinstance(update, PushResult) else ""
    over = "" if update.base is None else f" on the full weights of version {update.base}"
    lines = [f"Version {update.label} is current{over}{took}", *update.warnings]
    rows = [
        (
            plain(each.replica_id),
            plain(each.status if each.error is None else f"{each.status}: {each.error}"),
            *(f"{seconds:.3f}" for seconds in (each.load_s, each.swap_s, each.pause_s, each.canary_s)),
        )
        for each in update.replicas
    ]
    columns = ("replica", "status", ">load s", ">swap s", ">pause s", ">canary s")
    return table(Text("\n").join(map(plain, lines)), columns, rows)


def _text_of(number: int | None) -> str:
    return "" if number is None else str(number)


def _shortened(checksum: str | None) -> str:
    return (checksum or "")[:SHOWN_DIGITS]


policy_app = typer.Typer(invoke_without_command=True)


@policy_app.callback()
@command
def policy(
    context: typer.Context,
    service: Connection,
    checksums_within: Annotated[float, typer.Option(min=0, help="Seconds to wait for the replicas' checksums.")] = 0.0,
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
    name: Annotated[str | None, typer.Option(help="Serve the adapter of version TO as this named policy.")] = None,
    as_json: AsJson = False,
) -> None:
    """Make the weights of version TO current again, as a new version."""
    with service.client() as client:
        update = client.policy.rollback(to, version, name, mode=mode)
    show(update, as_json, _update_table(update))


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
    base: Annotated[int | None, typer.Option(help="The version that a delta or an adapter is based on.")] = None,
    name: Annotated[str | None, typer.Option(help="The named policy that an adapter becomes a version of.")] = None,
    mode: Annotated[PauseMode, typer.Option(help="What becomes of generations under way.")] = "keep",
    as_json: AsJson = False,
) -> None:
    """Upload the weights at PATH and have every replica serve them."""
    with service.client() as client:
        update = client.push_weights(path, version, kind=kind, base=base, name=name, mode=mode, progress=True)
    show(update, as_json, _update_table(update))
