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
def attempt(action):
    try:
        action()
    except OSError:
        return "refused"
    return "BREACH"
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
    """Attacks that print that they were refused: their names and sources, by the wall that stops them."""
    for wall, sources in by_wall.items():
        yield from (Attack(name, wall, source) for name, source in sources.items())
