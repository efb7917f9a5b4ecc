"""Parts that all walls share: the process to start, its interpreter, its variables, its limits and its user id."""

import contextlib
import fcntl
import os
import random
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from deployments.sandbox.interface import MAIN, Program, SandboxLost

NICENESS = 5
"""Programs leave the processors to the service."""
FIRST_UID, LAST_UID = 60706, 61183
"""systemd, whose table of user ids is the only one there is for this range, leaves these unused."""
_UID_LEASES = "rollout-sandbox-uid-"
"""Begins the abstract socket names by which the services of one machine lease user ids, one name for each id."""
_START = (Path(__file__).parent / "programs" / "start.py").read_text(encoding="utf-8")
"""Runs the program, with the builtins that people expect of Python."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A process to start.

    It writes lines of JSON to the status descriptor for which it was made: `child-pid`, the first process behind the
    walls, before that runs anything; and at the end, if the program was started, `exit-code`, after `processor-ms` if
    it knows that.
    """

    command: list[str]
    pass_fds: tuple[int, ...] = ()
    stop_signal: int = 9
    """Ends all of its processes when it is sent to the process."""


@dataclass(frozen=True, slots=True)
class Interpreter:
    """The Python that runs programs."""

    executable: str
    prefix: str
    """The folder that holds its library."""
    packages: tuple[str, ...] = ()
    """Further folders that programs import from."""

    @property
    def folders(self) -> list[str]:
        """Its folders that are not below the system's own."""
        return [folder for folder in (self.prefix, *self.packages) if not Path(folder).is_relative_to("/usr")]

    def command(self, program: Program) -> list[str]:
        """Starts in a third of the usual time: without the installed packages that the module `site` would look for."""
        return [self.executable, "-s", "-S", "-B", "-c", _START, MAIN, *program.arguments]

    def variables(self, home: str) -> dict[str, str]:
        """All environment variables of a program. None comes from the service."""
        variables = {
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "HOME": home,
            "TMPDIR": home,
            "LANG": "C.UTF-8",
            # Equal programs have equal outcomes, also if they print sets.
            "PYTHONHASHSEED": "0",
            # A thread would otherwise reserve 64 MiB of address space.
            "MALLOC_ARENA_MAX": "1",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        return variables | ({"PYTHONPATH": ":".join(self.packages)} if self.packages else {})


def held_file(closing: ExitStack, content: bytes) -> int:
    """A descriptor at the start of an immutable file in memory with this content, until `closing` is closed."""
    fd = os.memfd_create("sandbox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    closing.callback(os.close, fd)
    with open(fd, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(fd, 0, os.SEEK_SET)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
    return fd


@contextlib.contextmanager
def leased_uid() -> Iterator[int | None]:
    """A user id that no other process of this machine has, for the block; None if this process may not give one.

    Raises:
        SandboxLost: all user ids for sandboxes are taken.
    """
    if os.geteuid() != 0:
        yield None
        return
    # Containers of one machine do not see each other's names, but the kernel counts their processes together.
    for uid in random.sample(range(FIRST_UID, LAST_UID + 1), LAST_UID + 1 - FIRST_UID):
        with socket.socket(socket.AF_UNIX) as name:
            # The kernel gives an abstract name to one socket at a time, and takes it back when the process ends.
            try:
                name.bind(f"\0{_UID_LEASES}{uid}")
            except OSError:
                continue
            yield uid
            return
    raise SandboxLost(f"All {LAST_UID + 1 - FIRST_UID} user ids for sandboxes are taken on this machine.")


def default_interpreters(packages: tuple[str, ...]) -> list[Interpreter]:
    """The Python that runs the service, without its virtual environment; then that of the system."""
    own = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
    found = [Interpreter(str(own), str(Path(sys.base_prefix).resolve()), packages)]
    for path in ("/usr/local/bin/python3", "/usr/bin/python3"):
        executable = Path(path)
        if executable.exists() and executable.resolve() != own:
            found.append(Interpreter(str(executable.resolve()), str(executable.parent.parent), packages))
    return found
