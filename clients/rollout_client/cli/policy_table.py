"""Tables of versions, replicas and updates for a terminal, as rich renderables."""

from collections.abc import Sequence

from rich.console import Group
from rich.filesize import decimal
from rich.table import Table

from rollout_client.cli.transcript import plain
from rollout_client.policy_contract import NamedPolicyState, PolicyState, PolicyUpdate, PushResult, VersionInfo

SHOWN_DIGITS = 12


def policy_tables(state: PolicyState) -> Group:
    """The versions that the service has, its named policies if there are any, and what its replicas have loaded."""
    named = [named_table(state.named)] if state.named else []
    return Group(versions_table(state), *named, replicas_table(state))


def versions_table(state: PolicyState) -> Table:
    updating = "" if state.updating_to is None else f", updating to {state.updating_to}"
    table = Table(title=f"Version {state.current} is current{updating}", title_justify="left")
    for name in ("version", "kind", "base", "size", "created", "checksum"):
        table.add_column(name, justify="right" if name in {"version", "base", "size"} else "left")
    for info in state.versions:
        table.add_row(
            str(info.version),
            info.kind,
            "" if info.base is None else str(info.base),
            size_of(info),
            "" if info.kind == "initial" else f"{info.created_at:%Y-%m-%d %H:%M:%S}",
            shortened(info.checksum),
            style="bold" if info.version == state.current else "",
        )
    return table


def named_table(named: Sequence[NamedPolicyState]) -> Table:
    table = Table(title="Named policies", title_justify="left")
    for name in ("name", "version", "base", "size", "created", "checksum"):
        table.add_column(name, justify="right" if name in {"version", "base", "size"} else "left")
    for policy in named:
        updating = "" if policy.updating_to is None else f", updating to {policy.updating_to}"
        table.add_row(
            plain(policy.name),
            ("none" if policy.current is None else str(policy.current)) + updating,
            "" if policy.base is None else str(policy.base),
            decimal(policy.size_bytes) if policy.size_bytes else "",
            "" if policy.created_at is None else f"{policy.created_at:%Y-%m-%d %H:%M:%S}",
            shortened(policy.checksum),
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
    table = Table(title=f"Version {update.label} is current{took}", title_justify="left")
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
