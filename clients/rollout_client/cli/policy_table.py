"""Tables of versions, replicas and updates for a terminal, as rich renderables."""

from collections.abc import Mapping, Sequence

from rich.console import Console, ConsoleOptions, Group, JustifyMethod, RenderResult
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from rollout_client.cli.transcript import plain
from rollout_client.contract.policy import NamedPolicyState, PolicyState, PolicyUpdate, PushResult, VersionInfo

SHOWN_DIGITS = 12
DATE = "%Y-%m-%d %H:%M:%S"


def policy_tables(state: PolicyState) -> Group:
    """The versions that the service has, its named policies if there are any, and what its replicas have loaded."""
    named = [named_table(state.named)] if state.named else []
    return Group(versions_table(state), *named, replicas_table(state))


class WeightsTable:
    """Leaves out columns where a terminal is too narrow for all of them, the least important first.

    A date or a number that is broken over two lines, or cut, is not read.
    """

    DISPENSABLE = (None, "checksum", "base", "kind", "size", "created")
    """First none of them."""
    FOLDED: Mapping[str, int] = {"name": 8, "size": 8}
    """What may be broken, into lines of at least so many characters."""
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
            created="" if info.kind == "initial" else f"{info.created_at:{DATE}}",
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
