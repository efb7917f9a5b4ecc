"""Generator replicas for weight transfers without Ray and engines: they hang, fail and die by the kind of command."""

import asyncio
from dataclasses import dataclass, field

from deployments.policy.commands import (
    AcceptRequests,
    Command,
    CommandReport,
    FinishTransfer,
    LoadedWeights,
    ReplicaRegistration,
    Stage,
    Swap,
)
from deployments.policy.store import PolicyStore


@dataclass(eq=False)
class TransferringReplica:
    """Follows `store` as a replica does; it is its own actor. It is meant for virtual time."""

    store: PolicyStore
    name: str
    workers: int = 1
    loaded: LoadedWeights = field(default_factory=LoadedWeights)
    fails: dict[type[Command], str] = field(default_factory=dict)
    """By the kind of command, the error that it answers."""
    hangs: set[type[Command]] = field(default_factory=set)
    """Kinds of commands that it does not answer, until `go_on`."""
    dies: set[type[Command]] = field(default_factory=set)
    received: list[Command] = field(default_factory=list)
    staged: int = 0

    def __post_init__(self) -> None:
        self.accepts_requests = asyncio.Event()
        self.is_asked = asyncio.Event()
        """By a command on which it hangs."""
        self.go_on = asyncio.Event()
        self.killed = asyncio.Event()
        self.is_alive = True
        self._living: asyncio.Task[None] | None = None

    async def register(self) -> "TransferringReplica":
        await self.store.register(ReplicaRegistration(self.name, self, self.workers, self.loaded))
        self._living = asyncio.create_task(self._live())
        return self

    async def register_and_serve(self) -> "TransferringReplica":
        await self.register()
        await self.accepts_requests.wait()
        return self

    def end(self) -> None:
        self.is_alive = False
        self.killed.set()
        if self._living is not None:
            self._living.cancel()

    async def _live(self) -> None:
        report: CommandReport | None = None
        while True:
            numbered = await self.store.next_command(self.name, report)
            report = None if numbered is None else await self._carry_out(numbered.number, numbered.command)

    async def _carry_out(self, number: int, command: Command) -> CommandReport:
        self.received.append(command)
        kind = type(command)
        if kind in self.dies:
            self.end()
            await asyncio.sleep(0)
        if kind in self.hangs:
            self.is_asked.set()
            await self.go_on.wait()
        if kind in self.fails:
            return CommandReport(number, self.loaded, self.fails[kind])
        if isinstance(command, AcceptRequests):
            self.accepts_requests.set()
        if isinstance(command, FinishTransfer):
            self.loaded = LoadedWeights(command.version)
        if isinstance(command, Stage):
            self.staged = command.payload.version
        if isinstance(command, Swap):
            self.loaded = LoadedWeights(self.staged)
        return CommandReport(number, self.loaded)
