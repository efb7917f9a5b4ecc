"""The walls of a sandbox, and the report that says which of them stand."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

WallName = Literal[
    "network",
    "files",
    "service_processes",
    "environment_variables",
    "system_calls",
    "processor_time",
    "memory",
    "total_memory",
    "process_count",
    "file_size",
    "disk",
    "ends_whole",
]
"""What a program cannot do while the wall stands:

- `network`: reach anything by a socket.
- `files`: read or write anything but its own directory and, to read only, the system's programs and libraries.
- `service_processes`: see, signal or trace a process that is not its own.
- `environment_variables`: read those of the service.
- `system_calls`: use kernel interfaces that ordinary programs do not need, such as `ptrace`, `mount` and `bpf`.
- `processor_time`, `memory`, `process_count`, `file_size`, `disk`: use more than its limit. `memory` is of one process.
- `total_memory`: use more memory than its limit by many processes.
- `ends_whole`: leave a process behind.

The limits of wall time and of output always stand: the service keeps them itself.
"""

WALLS: tuple[WallName, ...] = get_args(WallName)


@dataclass(frozen=True, slots=True)
class Wall:
    """Whether one wall stands, as tried out at the start."""

    name: WallName
    stands: bool
    by: str
    """What enforces it, or why it does not stand."""


@dataclass(frozen=True, slots=True)
class WallReport:
    """What the sandbox tried out at its start."""

    isolation: str
    """`bubblewrap`, `namespaces` or `limits`."""
    walls: tuple[Wall, ...]

    def __getitem__(self, name: WallName) -> Wall:
        return next(wall for wall in self.walls if wall.name == name)

    def missing(self, names: Iterable[WallName] = WALLS) -> list[Wall]:
        """Those of the named walls that do not stand."""
        return [self[name] for name in names if not self[name].stands]

    def __str__(self) -> str:
        """One line a wall."""
        lines = [f"{wall.name}: {'stands' if wall.stands else 'DOES NOT STAND'} ({wall.by})" for wall in self.walls]
        return "\n".join([f"isolation: {self.isolation}", *lines])


class SandboxTooWeak(Exception):
    """Walls that the config requires do not stand on this machine. The message names them and what to do."""

    def __init__(self, report: WallReport, missing: Iterable[Wall]) -> None:
        reasons = "; ".join(f"{wall.name} ({wall.by})" for wall in missing)
        super().__init__(
            f"The sandbox is not started: required walls do not stand on this machine: {reasons}. Its isolation is "
            f"{report.isolation}. Install bubblewrap and permit namespaces to the service, or do not require these "
            "walls."
        )
        self.report = report
