"""Runs programs on this machine, under the strongest walls that it permits.

A service that runs as root gives each run a user id that no other process of this machine has.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Literal
from weakref import WeakKeyDictionary

from deployments.sandbox.bubblewrap import Bubblewrap
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
)
from deployments.sandbox.launch import Interpreter, default_interpreters, leased_uid
from deployments.sandbox.limits import LimitJail
from deployments.sandbox.supervisor import ProcessTree, run_to_end

IsolationName = Literal["auto", "bubblewrap", "limits"]
Isolation = Bubblewrap | LimitJail
ISOLATIONS: dict[str, Callable[[Interpreter], Isolation]] = {"bubblewrap": Bubblewrap, "limits": LimitJail}
"""The stronger one first."""
DEFAULT_LIMITS = Limits()
_NO_PROGRAM, _LIMITS = Program(""), Limits(time_s=60.0, processor_time_s=30.0)
"""Tried at the start, also on a machine that is busy."""
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
        """Takes the isolation under which a program runs here. Takes less than a second.

        Args:
            max_concurrent_runs: of one event loop; further runs wait.
            isolation: `auto` takes the strongest one that works.
            require: walls without which the sandbox does not start; `all` for each of them.
            packages: folders that programs may import from, beside the standard library.

        Raises:
            SandboxTooWeak: a required wall does not stand.
            SandboxLost: no program can be run.
        """
        self._max_concurrent_runs = max_concurrent_runs
        self._places: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()
        self._trees: dict[ProcessTree, asyncio.AbstractEventLoop] = {}
        self._closed = False
        self._isolation, self.report = self._strongest(isolation, tuple(packages))
        required = WALLS if require == "all" else require
        if missing := [name for name in required if name in self.report.missing]:
            raise SandboxTooWeak(
                "The sandbox is not started: required walls do not stand on this machine: "
                f"{', '.join(missing)}. Its isolation is {self.report.isolation}. Install bubblewrap and permit "
                "namespaces to the service, or do not require these walls."
            )
        logger.log(
            logging.WARNING if self.report.missing else logging.INFO,
            "The sandbox has started. Its isolation is %s; walls that do not stand: %s.",
            self.report.isolation,
            ", ".join(self.report.missing) or "none",
        )

    async def run(
        self, program: Program, files: Mapping[str, bytes] | None = None, limits: Limits = DEFAULT_LIMITS
    ) -> Outcome:
        """See `Sandbox.run`."""
        checked = program.checked_files(files or {})
        loop = asyncio.get_running_loop()
        async with self._places.setdefault(loop, asyncio.Semaphore(self._max_concurrent_runs)):
            running = asyncio.ensure_future(self._run(self._isolation, program, checked, limits))
            try:
                return await asyncio.shield(running)
            except asyncio.CancelledError:
                # It ends all of its processes, also if the caller is cancelled again.
                running.cancel()
                raise

    def close(self) -> None:
        """Ends all runs."""
        self._closed = True
        for tree, loop in list(self._trees.items()):
            # The loop of a run may have ended, and its processes with it.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(tree.kill)

    async def _run(self, isolation: Isolation, program: Program, files: Mapping[str, bytes], limits: Limits) -> Outcome:
        tree = ProcessTree()
        self._trees[tree] = asyncio.get_running_loop()
        try:
            with leased_uid() as uid:
                async with isolation.launch(program, files, limits, uid, tree.status_fd) as launch:
                    if self._closed:
                        raise SandboxLost("It was closed.")
                    return await run_to_end(tree, launch, program.stdin.encode("utf-8", "surrogatepass"), limits)
        except (OSError, SandboxLost) as error:
            if self._closed:
                raise SandboxLost("The sandbox was closed during the run.") from error
            raise error if isinstance(error, SandboxLost) else SandboxLost(f"The sandbox failed: {error}.") from error
        finally:
            del self._trees[tree]
            tree.close()

    def _strongest(self, name: IsolationName, packages: tuple[str, ...]) -> tuple[Isolation, WallReport]:
        """The first isolation under which a program runs. Raises `SandboxLost` with what each one said."""
        problems = []
        for isolation in _candidates(name, packages):
            try:
                # The caller may be in an event loop.
                with ThreadPoolExecutor(1) as thread:
                    run = self._run(isolation, _NO_PROGRAM, _NO_PROGRAM.checked_files({}), _LIMITS)
                    tried = thread.submit(asyncio.run, run).result()
            except SandboxLost as error:
                problems.append(f"{isolation.name}: {error}")
                continue
            if tried.exit_code == 0:
                return isolation, WallReport(isolation.name, tuple(wall for wall in WALLS if wall in isolation.without))
            problems.append(
                f"{isolation.name}: a program ended by {tried.ended_by} with exit code {tried.exit_code} and wrote "
                f"{tried.stderr.strip()[-500:]!r}."
            )
        raise SandboxLost(f"No program can be run in a sandbox on this machine. {' '.join(problems)}")


def _candidates(name: IsolationName, packages: tuple[str, ...]) -> Iterator[Isolation]:
    for isolation_name, isolation in ISOLATIONS.items():
        if name in ("auto", isolation_name):
            for interpreter in default_interpreters(packages):
                yield isolation(interpreter)
