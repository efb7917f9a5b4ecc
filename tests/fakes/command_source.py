"""The policy store as a replica sees it (`CommandSource`)."""

import asyncio
from collections.abc import Mapping

from deployments.policy.commands import (
    Command,
    CommandReport,
    CommandSource,
    LoadedWeights,
    NumberedCommand,
    ReplicaRegistration,
)


class ScriptedCommands(CommandSource):
    """Gives its commands one after the other, then raises `end`, or waits for further ones."""

    def __init__(self, *commands: Command, end: Exception | None = None) -> None:
        self.end = end
        self.registrations: list[LoadedWeights] = []
        self.trials: list[tuple[bool, dict[int, str]]] = []
        self.named: list[Mapping[str, int]] = []
        """With each registration."""
        self.reports: list[CommandReport] = []
        self.checksums: list[tuple[LoadedWeights, str]] = []
        self._commands = list(commands)
        self._given = 0
        self._has_more = asyncio.Event()
        self._has_reported = asyncio.Event()

    @property
    def errors(self) -> list[tuple[str | None, bool]]:
        """Of each report, and whether the replica is broken."""
        return [(report.error, report.broken) for report in self.reports]

    async def carried_out(self, command: Command) -> CommandReport:
        """The report of a command that is given after all others."""
        self._commands.append(command)
        self._has_more.set()
        self._has_reported.clear()
        await self._has_reported.wait()
        return self.reports[-1]

    async def register(self, registration: ReplicaRegistration) -> None:
        self.registrations.append(registration.loaded)
        self.trials.append((registration.is_on_trial, dict(registration.keys)))
        self.named.append(registration.named)

    async def next_command(self, replica_id: str, report: CommandReport | None) -> NumberedCommand | None:
        assert replica_id == "replica"
        if report is not None:
            self.reports.append(report)
            self._has_reported.set()
        while not self._commands:
            if self.end is not None:
                raise self.end
            self._has_more.clear()
            await self._has_more.wait()
        self._given += 1
        return NumberedCommand(self._given, self._commands.pop(0))

    async def record_checksum(self, replica_id: str, loaded: LoadedWeights, checksum: str) -> None:
        self.checksums.append((loaded, checksum))
