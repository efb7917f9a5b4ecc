"""What an attack is: a program that tries to get over one wall, and how its run ends where the wall stands."""

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from deployments.sandbox import Limits, WallName
from deployments.sandbox.interface import MIB, EndedBy

LIMITS = Limits(
    time_s=20.0,
    processor_time_s=0.5,
    memory_bytes=128 * MIB,
    processes=16,
    file_bytes=MIB,
    disk_bytes=4 * MIB,
    output_bytes=MIB // 16,
    open_files=64,
)
SHORT = Limits(time_s=0.7, processor_time_s=20.0)
PRELUDE = """
import os, sys, time, socket, signal
PROCESSES = [*range(1, 40), os.getppid(), int(sys.argv[2]), "self"]
def attempt(action, places=None):
    for place in [None] if places is None else places:
        try: action() if places is None else action(place)
        except OSError: continue
        return "BREACH"
    return "refused"
def tell(is_breach): print("BREACH" if is_breach else "refused")
def texts(paths):
    found = []
    for path in paths:
        try: found.append(open(path).read())
        except OSError: pass
    return found
def libc(name, *arguments):
    import ctypes
    library = ctypes.CDLL(None, use_errno=True)
    return getattr(library, name)(*arguments), ctypes.get_errno()
def call(x86, other, *arguments):
    number = x86 if os.uname().machine == "x86_64" else other
    result, error = libc("syscall", number, *arguments)
    tell(result >= 0 or error not in (1, 22, 38, 13))
"""


@dataclass(frozen=True, slots=True)
class Attack:
    """`sys.argv` of the program is: a token, the service's process id, TCP port, abstract socket, socket path, file."""

    name: str
    wall: WallName | None
    """The wall that stops it; None for the limits of wall time and of output, and for what harms the program alone."""
    source: str
    ended_by: tuple[EndedBy, ...] = ("exit",)
    exit_code: int | None = 0
    stdout: str | None = "refused\n"
    """Exactly; None for anything without the word BREACH."""
    limits: Limits = LIMITS

    @property
    def program(self) -> str:
        return PRELUDE + textwrap.dedent(self.source)


def endless(name: str, wall: WallName | None, source: str, *ended_by: EndedBy, limits: Limits = LIMITS) -> Attack:
    """An attack that ends at a limit."""
    return Attack(name, wall, source, ended_by, None, None, limits)


def refused(by_wall: Mapping[WallName | None, Mapping[str, str]]) -> Iterator[Attack]:
    """Attacks that print that they were refused, by the wall that stops them: names, and programs or what is tried."""
    for wall, sources in by_wall.items():
        for name, source in sources.items():
            is_program = source.startswith(("\n", "print", "tell", "call"))
            yield Attack(name, wall, source if is_program else f"print(attempt(lambda: {source}))")
