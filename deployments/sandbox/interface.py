"""Interface of a sandbox, which runs untrusted Python programs, and its walls.

`LocalSandbox` (`local.py`) runs it on this machine. Sandboxes that live for a whole rollout, and their providers, are
in `providers/`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal, Protocol, get_args

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
"""Walls of a sandbox. While a wall stands, a program cannot:

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
class WallReport:
    """The isolation that a sandbox has taken at its start, and its walls."""

    isolation: str
    """`bubblewrap` or `limits`."""
    missing: tuple[WallName, ...]
    """Walls that nothing enforces on this machine."""


class SandboxTooWeak(Exception):
    """Walls that the config requires do not stand on this machine. The message names them and what to do."""


MAIN = "main.py"
"""The file in the working directory that holds the source of the program."""

MIB = 2**20

EndedBy = Literal["exit", "time", "processor_time", "memory", "output"]


class SandboxLost(Exception):
    """The sandbox itself failed, so nothing is known about the program. Another try may succeed."""


@dataclass(frozen=True, slots=True)
class Program:
    """A Python program."""

    source: str
    stdin: str = ""
    arguments: tuple[str, ...] = ()
    """`sys.argv[1:]`."""

    def checked_files(self, files: Mapping[str, bytes]) -> dict[str, bytes]:
        """All files of the run by normalized path, the program's source among them. Raises `ValueError`."""
        checked = {}
        for name, content in files.items():
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
                raise ValueError(f"files: {name!r} must be a relative path without '..'.")
            checked[str(path)] = content
        if MAIN in checked:
            raise ValueError(f"files: {MAIN!r} is the program's own name, choose another one.")
        return {MAIN: self.source.encode("utf-8", "surrogatepass"), **checked}


@dataclass(frozen=True, slots=True)
class Limits:
    """Resource limits of one run."""

    time_s: float = 30.0
    """Wall time from the start of its process. On a busy machine a program gets less processor time within it."""
    processor_time_s: float = 5.0
    """Processor time of all its processes together; for each of them rounded up to whole seconds."""
    memory_bytes: int = 512 * MIB
    """Memory of all its processes together, counting shared pages for each; also the address space of each."""
    processes: int = 32
    """Processes and threads at once."""
    file_bytes: int = 16 * MIB
    """Size of one file."""
    disk_bytes: int = 64 * MIB
    """Size of all files in its private directory."""
    output_bytes: int = MIB
    """Size of stdout, and of stderr. A program that writes more is ended."""
    open_files: int = 128
    """Open files of one process."""

    def of_kernel(self, processes: int) -> dict[str, tuple[int, int]]:
        """Soft and hard limit by the name of `resource.RLIMIT_*`, in lower case."""
        seconds = math.ceil(self.processor_time_s)
        return {
            "as": (self.memory_bytes, self.memory_bytes),
            # At the soft limit the signal SIGXCPU, which a program may ignore; a second later it is killed.
            "cpu": (seconds, seconds + 1),
            "fsize": (self.file_bytes, self.file_bytes),
            "nproc": (processes, processes),
            "nofile": (self.open_files, self.open_files),
            "core": (0, 0),
            "msgqueue": (0, 0),
            "memlock": (65536, 65536),
        }


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended. All its processes have ended too."""

    ended_by: EndedBy
    """`exit`: by itself. Else the limit that it reached; the run was ended then."""
    exit_code: int | None
    """Exit code of a program that ended by itself, 128 + n if signal n ended it; None if a limit did."""
    stdout: str
    """At most `output_bytes`, decoded as UTF-8 with replacement characters."""
    stderr: str
    wall_s: float
    """Seconds from the start of the run to its end."""


class Sandbox(Protocol):
    """Runs programs. Runs share nothing and may overlap."""

    async def run(self, program: Program, files: Mapping[str, bytes], limits: Limits) -> Outcome:
        """Runs the program in an empty private directory with `files`. Cancelling the call ends the run.

        Args:
            files: by relative path. The directory's own `main.py` is the program.

        Raises:
            ValueError: a path in `files` leads out of the directory, or is that of the program.
            SandboxLost: the sandbox failed.
        """
        ...

    def close(self) -> None:
        """Ends all runs and releases what the sandbox holds."""
        ...
