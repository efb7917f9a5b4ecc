"""Runs programs on this machine, under the strongest isolation that it permits.

A service that runs as root gives each run a user id that no other process of this machine has (`UserIdLease`).
"""

import asyncio
import logging
import os
import queue
import random
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Literal

from deployments.sandbox.interface import (
    WALLS,
    Limits,
    Outcome,
    Program,
    Sandbox,
    SandboxLost,
    SandboxTooWeak,
    WallName,
    WallReport,
    checked_files,
)
from deployments.sandbox.isolation import Bubblewrap, LimitJail
from deployments.sandbox.launch import Interpreter, Isolation, default_interpreters
from deployments.sandbox.self_test import check_walls
from deployments.sandbox.supervisor import Cancellation, RunCancelled, Supervisor

FIRST_UID, LAST_UID = 60706, 61183
"""systemd, whose table of user ids is the only one there is for this range, leaves these unused."""


class NoUserIdLeft(Exception):
    """All user ids for sandboxes are taken on this machine."""


class UserIdLease:
    """A user id, held until `close` or the end of this process."""

    def __init__(self) -> None:
        """Raises `NoUserIdLeft`."""
        # Containers of one machine do not see each other's names, but the kernel counts their processes together.
        for uid in random.sample(range(FIRST_UID, LAST_UID + 1), LAST_UID + 1 - FIRST_UID):
            # The kernel gives an abstract name to one socket at a time, and takes it back when the process ends.
            name = socket.socket(socket.AF_UNIX)
            try:
                name.bind(f"\0rollout-sandbox-uid-{uid}")
            except OSError:
                name.close()
                continue
            self.uid = uid
            self._name = name
            return
        raise NoUserIdLeft(f"All {LAST_UID + 1 - FIRST_UID} user ids for sandboxes are taken on this machine.")

    def close(self) -> None:
        self._name.close()


IsolationName = Literal["auto", "bubblewrap", "limits"]
DEFAULT_LIMITS = Limits()
ISOLATIONS: dict[str, Callable[[Interpreter], Isolation]] = {
    "bubblewrap": Bubblewrap,
    "limits": LimitJail,
}
"""The stronger one first."""

logger = logging.getLogger("rollout_service.sandbox")


class LocalSandbox(Sandbox):
    """Runs each program in processes of its own. `report` says which walls stand."""

    def __init__(
        self,
        max_concurrent_runs: int = 2,
        isolation: IsolationName = "auto",
        require: Sequence[WallName] | Literal["all"] = (),
        packages: Sequence[str] = (),
    ) -> None:
        """Tries out which walls stand. Takes less than a second.

        Args:
            max_concurrent_runs: further runs wait.
            isolation: `auto` takes the strongest one that works.
            require: walls without which the sandbox does not start; `all` for each of them.
            packages: folders that programs may import from, beside the standard library.

        Raises:
            SandboxTooWeak: a required wall does not stand.
            SandboxLost: no program can be run.
            ValueError: an argument has no permitted value.
        """
        check_arguments(max_concurrent_runs, isolation, require)
        self._threads = ThreadPoolExecutor(max_concurrent_runs, thread_name_prefix="sandbox")
        self._leases = [UserIdLease() for _ in range(max_concurrent_runs)] if os.geteuid() == 0 else []
        self._uids: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        for slot in range(max_concurrent_runs):
            self._uids.put(self._leases[slot].uid if self._leases else None)
        self._lock = threading.Lock()
        self._cancellations: set[Cancellation] = set()
        try:
            self._isolation, self.report = self._strongest(isolation, tuple(packages))
            if missing := self.report.missing(WALLS if require == "all" else require):
                raise SandboxTooWeak(self.report, missing)
        except BaseException:
            self.close()
            raise
        for wall in self.report.missing():
            logger.warning("A wall of the sandbox does not stand: %s (%s).", wall.name, wall.by)
        logger.info("The sandbox has started. %s", self.report)

    async def run(
        self, program: Program, files: Mapping[str, bytes] | None = None, limits: Limits = DEFAULT_LIMITS
    ) -> Outcome:
        """See `Sandbox.run`."""
        checked = checked_files(program, files or {})
        cancellation = Cancellation()
        with self._lock:
            self._cancellations.add(cancellation)
        future = self._threads.submit(self._run, program, checked, limits, cancellation)
        future.add_done_callback(lambda _: self._forget(cancellation))
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            cancellation.cancel()
            raise
        except RunCancelled as error:
            raise SandboxLost("The sandbox was closed during the run.") from error

    def close(self) -> None:
        """Ends all runs."""
        with self._lock:
            for cancellation in self._cancellations:
                cancellation.cancel()
        self._threads.shutdown(cancel_futures=True)
        for lease in self._leases:
            lease.close()

    def _forget(self, cancellation: Cancellation) -> None:
        with self._lock:
            self._cancellations.discard(cancellation)
        cancellation.close()

    def _run(
        self,
        program: Program,
        files: Mapping[str, bytes],
        limits: Limits,
        cancellation: Cancellation,
        isolation: Isolation | None = None,
    ) -> Outcome:
        isolation = isolation or self._isolation
        uid = self._uids.get()
        try:
            with (
                Supervisor(limits, cancellation) as supervisor,
                isolation.launch(program, files, limits, uid, supervisor.status_fd_of_launch) as launch,
            ):
                return supervisor.run(launch, program.stdin.encode("utf-8", "surrogatepass"))
        except OSError as error:
            raise SandboxLost(f"The sandbox failed: {error}.") from error
        finally:
            self._uids.put(uid)

    def _strongest(self, name: IsolationName, packages: tuple[str, ...]) -> tuple[Isolation, WallReport]:
        """The first isolation under which a program runs. Raises `SandboxLost` with what each one said."""
        problems = []
        for isolation in candidates(name, packages):
            try:
                return isolation, check_walls(isolation.name, isolation.by, partial(self._try, isolation))
            except SandboxLost as error:
                problems.append(f"{isolation.name}: {error}")
        raise SandboxLost(f"No program can be run in a sandbox on this machine. {' '.join(problems)}")

    def _try(self, isolation: Isolation, program: Program, limits: Limits) -> Outcome:
        cancellation = Cancellation()
        try:
            return self._run(program, checked_files(program, {}), limits, cancellation, isolation)
        finally:
            cancellation.close()


def candidates(name: IsolationName, packages: tuple[str, ...]) -> Iterator[Isolation]:
    for isolation_name, isolation in ISOLATIONS.items():
        if name in ("auto", isolation_name):
            for interpreter in default_interpreters(packages):
                yield isolation(interpreter)


def check_arguments(max_concurrent_runs: int, isolation: str, require: Sequence[WallName] | Literal["all"]) -> None:
    """Raises `ValueError` with a sentence."""
    if max_concurrent_runs < 1:
        raise ValueError(f"max_concurrent_runs must be at least 1, got {max_concurrent_runs}.")
    if isolation not in ("auto", *ISOLATIONS):
        raise ValueError(f"isolation must be one of auto, {', '.join(ISOLATIONS)}; got {isolation!r}.")
    if require != "all" and (unknown := [name for name in require if name not in WALLS]):
        raise ValueError(f"require names {', '.join(map(repr, unknown))}; the walls are {', '.join(WALLS)}, or all.")
