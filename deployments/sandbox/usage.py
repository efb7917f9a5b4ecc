"""Measures what all processes of a run use, through the process file system of its own namespace."""

import os
from contextlib import suppress
from dataclasses import dataclass

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
USER_TIME, CHILDREN_SYSTEM_TIME, RESIDENT_PAGES = 11, 14, 21
"""Places in `/proc/<pid>/stat` behind the name of the program, which may hold anything."""


@dataclass(frozen=True, slots=True)
class Usage:
    memory_bytes: int
    """Resident pages; those that processes share count for each."""
    processor_time_s: float
    """Also of the processes that have ended."""


class RunUsage:
    """Measures one run by its first process, whose namespace holds all others. Costs microseconds a process."""

    def __init__(self, first_pid: int) -> None:
        self._first_pid = first_pid
        self._proc: int | None = None

    def read(self) -> Usage | None:
        """What the run uses now; None if that cannot be seen: it has not begun, it has ended, or it is forbidden."""
        try:
            if self._proc is None:
                self._proc = opened_proc(self._first_pid)
            if self._proc is None:
                return None
            stats = [read_stat(self._proc, name) for name in os.listdir(self._proc) if name.isdigit()]  # noqa: PTH208
        except OSError:
            return None
        running = [stat for stat in stats if stat is not None]
        ticks = sum(int(field) for stat in running for field in stat[USER_TIME : CHILDREN_SYSTEM_TIME + 1])
        return Usage(sum(int(stat[RESIDENT_PAGES]) for stat in running) * PAGE_BYTES, ticks / TICKS_PER_S)

    def close(self) -> None:
        if self._proc is not None:
            os.close(self._proc)
            self._proc = None


def opened_proc(first_pid: int) -> int | None:
    """The run's own `/proc`; None while the run still sees that of the machine."""
    fd = os.open(f"/proc/{first_pid}/root/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.readlink("self", dir_fd=fd)
    except FileNotFoundError:
        # This process is not in the namespace to which the directory belongs.
        return fd
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None


def read_stat(proc: int, pid: str) -> list[str] | None:
    """The fields of a process from its state on; None if it has ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        fd = os.open(f"{pid}/stat", os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc)
        try:
            return os.read(fd, 4096).decode(errors="replace").rpartition(")")[2].split()
        finally:
            os.close(fd)
    return None
