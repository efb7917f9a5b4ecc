"""Generator replicas without an engine: they register, poll for commands, and follow a script."""

import asyncio
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from deployments.policy.assembly import write_applied
from deployments.policy.commands import (
    AcceptRequests,
    Canary,
    Command,
    CommandCosts,
    CommandReport,
    CommandSource,
    FinishTransfer,
    Hold,
    LoadedWeights,
    NumberedCommand,
    Release,
    ReplicaNotRegistered,
    ReplicaRegistration,
    SaveTransfer,
    SetAdapters,
    Stage,
    StoredFile,
    Swap,
    VersionPayload,
)
from deployments.policy.failures import WeightsRefused
from deployments.policy.node_files import WeightsNotFetched
from deployments.policy.replica_registry import ReplicaRegistry
from tests.fakes.cluster import ScriptedCluster
from tests.virtual_time import now

Step = Literal["ok", "error", "die", "die after", "hang", "register again"]
"""The replica's answer to a command. `die` and `die after`: it dies before or after it has carried it out, without
a report; `hang`: it does nothing; `register again`: it carries it out, and registers again instead of reporting."""

COSTS = {
    Stage: CommandCosts(load_s=1.0),
    Swap: CommandCosts(swap_s=2.0, pause_s=3.0),
    SetAdapters: CommandCosts(load_s=1.0, fetched_bytes=70),
    AcceptRequests: CommandCosts(canary_s=4.0),
}
"""The costs of each command."""


class Died(Exception):
    pass


@dataclass
class RegistryCommandSource(CommandSource):
    """A registry without the store around it."""

    registry: ReplicaRegistry

    async def register(self, registration: ReplicaRegistration) -> None:
        self.registry.register(registration)

    async def next_command(self, replica_id: str, report: CommandReport | None) -> NumberedCommand | None:
        return await self.registry.next_command(replica_id, report)

    async def record_checksum(self, replica_id: str, loaded: LoadedWeights, checksum: str) -> None:
        self.registry.record_checksum(replica_id, loaded, checksum)


@dataclass(eq=False)
class ScriptedReplica:
    """Follows `script`, one step a command, and carries out all commands after its end. Each takes `command_s`."""

    name: str
    store: CommandSource
    cluster: ScriptedCluster
    script: Iterable[Step] = ()
    loaded: LoadedWeights = field(default_factory=LoadedWeights)
    command_s: float = 0.0
    is_alive: bool = True
    accepts_requests: bool = False
    """Whether it was ever told that it may."""
    is_on_trial: bool = False
    """Whether no generation may use what is loaded."""
    staged: VersionPayload | None = None
    keys: dict[int, str | None] = field(default_factory=dict)
    """The store's keys of the versions that were staged or transferred."""
    files: dict[int, bytes] = field(default_factory=dict)
    """Its node's files of the versions that were staged."""
    saves: bytes | None = None
    """The weights that it saves of each transfer."""
    saved_checksum: str = ""
    """The checksum that it reports of them."""
    is_busy: bool = False
    """With a command."""
    workers: int = 1
    received: list[NumberedCommand] = field(default_factory=list)
    """The commands that reached it."""
    holds: set[type[Command]] = field(default_factory=set)
    """Kinds of commands that it carries out only once `go_on` is set."""
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    named: dict[str, int] = field(default_factory=dict)
    """By name, the versions of named policies that it serves."""
    adapters: dict[str, bytes] = field(default_factory=dict)
    """The files of these."""
    at: dict[type[Command], Step] = field(default_factory=dict)
    """Its step with the next command of a kind, in place of that of the script."""
    changes_nothing: bool = False
    """Whether its canaries say the same of new weights as of those before."""
    held_until: float = 0.0
    """When its hold ends."""
    deltas: list[int] = field(default_factory=list)
    """The versions that its node has made of a delta."""

    @property
    def kinds(self) -> list[type[Command]]:
        """Of the commands that reached it. That it saves weights of a transfer is no step of it."""
        return [type(each.command) for each in self.received if not isinstance(each.command, SaveTransfer)]

    def __post_init__(self) -> None:
        self._script = deque(self.script)
        self._life: asyncio.Task[None] | None = None

    async def start(self) -> "ScriptedReplica":
        """Returns once it has registered."""
        await self.register()
        self._life = asyncio.create_task(self._live())
        return self

    async def register(self) -> None:
        held = {version: self.keys.get(version) for version in (self.loaded.full, self.loaded.adapter) if version}
        keys = {version: key for version, key in held.items() if key is not None}
        registration = ReplicaRegistration(
            self.name, self, self.workers, self.loaded, keys, self.is_on_trial, self.named, self.held_s
        )
        await self.store.register(registration)

    @property
    def held_s(self) -> float:
        return max(self.held_until - now(), 0.0)

    def end(self) -> None:
        self.is_alive = False
        if self._life is not None:
            self._life.cancel()

    async def _live(self) -> None:
        report: CommandReport | None = None
        while self.is_alive:
            try:
                numbered = await self.store.next_command(self.name, report)
                self.is_busy = True
                report = None if numbered is None else await self._report_of(numbered)
                self.is_busy = False
            except ReplicaNotRegistered:
                report = None
                await self.register()
            except Died:
                self.is_alive = False

    async def _report_of(self, numbered: NumberedCommand) -> CommandReport | None:
        self.received.append(numbered)
        await asyncio.sleep(self.command_s)
        kind = type(numbered.command)
        step = self.at.pop(kind, None) or (self._script.popleft() if self._script else "ok")
        if kind in self.holds:
            await self.go_on.wait()
        if step == "die":
            raise Died
        if step == "hang":
            await asyncio.Event().wait()
        report = CommandReport(numbered.number, self.loaded, held_s=self.held_s)
        if step == "error":
            return replace(report, error=f"OSError: {self.name} has no room", broken=isinstance(numbered.command, Swap))
        try:
            self._carry_out(numbered)
        except (WeightsNotFetched, WeightsRefused) as failure:
            return replace(report, error=f"WeightsNotFetched: {failure}")
        if step == "die after":
            raise Died
        if step == "register again":
            await self.register()
            return None
        if isinstance(numbered.command, SaveTransfer):
            return self._saved(report, numbered.command.version)
        is_tried = isinstance(numbered.command, Canary | SetAdapters)
        costs = COSTS.get(type(numbered.command), CommandCosts())
        report = replace(report, held_s=self.held_s)
        return replace(report, loaded=self.loaded, costs=costs, changes_nothing=is_tried and self.changes_nothing)

    def _saved(self, report: CommandReport, version: int) -> CommandReport:
        if self.saves is None:
            return replace(report, error="WeightsNotSaved: no space left")
        self.note("save", version)
        path = f"/{self.name}/{version}"
        self.cluster.saved[path] = self.saves
        file = StoredFile(path, f"node of {self.name}", inode=0, modified_ns=0)
        return replace(report, saved=VersionPayload(version, "full", len(self.saves), self.saved_checksum, file))

    def _carry_out(self, numbered: NumberedCommand) -> None:
        if isinstance(numbered.command, Swap | SetAdapters | Release):
            self.held_until = 0.0
        match numbered.command:
            case Hold(_, lease_s):
                self.held_until = now() + lease_s
            case Stage(payload):
                self.staged = payload
                self.keys[payload.version] = payload.key
                if (content := self._content_of(payload)) is not None:
                    self.files[payload.version] = content
                self.note("stage", payload.version)
            case Swap(_, is_trial):
                assert self.staged is not None
                self.is_on_trial = is_trial
                version = self.staged.version
                is_adapter = self.staged.kind == "adapter"
                self.loaded = LoadedWeights(self.loaded.full, version) if is_adapter else LoadedWeights(version)
                if not is_adapter:
                    self.named, self.adapters = {}, {}
                self.note("swap", version)
            case SetAdapters(payloads, _, is_trial):
                assert {payload.base for payload in payloads} <= {self.loaded.full}
                for payload in payloads:
                    self.note(f"try {payload.name}" if is_trial else f"serve {payload.name}", payload.version)
                if not is_trial:
                    self.named = {str(payload.name): payload.version for payload in payloads}
                    self.adapters = {str(each.name): Path(each.file.path).read_bytes() for each in payloads}
            case Canary():
                self.note("canary", self.loaded.version)
            case AcceptRequests():
                self.is_on_trial = False
                self.accepts_requests = True
                self.note("accept requests", self.loaded.version)
            case FinishTransfer(version, key):
                self.keys[version] = key
                self.loaded = LoadedWeights(version)

    def _content_of(self, payload: VersionPayload) -> bytes | None:
        """The content as a node has it, which applies a delta to its own base or to the store's file of it."""
        if payload.delta is None:
            path = Path(payload.file.path)
            return path.read_bytes() if path.exists() else None
        base = payload.delta.base
        content = self.files.get(base.version) or self._content_of(base)
        if content is None:
            return None
        self.deltas.append(payload.version)
        return applied(content, Path(payload.delta.changes.file.path), payload.checksum)

    def note(self, what: str, version: int) -> None:
        self.cluster.events.append((self.name, what, version))


def applied(base: bytes, delta: Path, checksum: str) -> bytes:
    """Raises `WeightsNotFetched` as a node does."""
    with TemporaryDirectory() as folder:
        (Path(folder) / "base").write_bytes(base)
        made = write_applied(Path(folder) / "base", delta, Path(folder) / "full")
        if made != checksum:
            raise WeightsNotFetched(f"the delta makes weights with the checksum {made}")
        return (Path(folder) / "full").read_bytes()
