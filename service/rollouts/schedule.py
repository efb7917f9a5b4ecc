"""Schedules: when the samples of a request may begin their next phase, each on its own or all together.

A phase is a generation or an environment step. A new schedule implements `Schedule`.
"""

import asyncio
from typing import ClassVar, Protocol

from service.rollouts.pacing import PacedWork


class Schedule(Protocol):
    """One schedule serves one request."""

    in_lockstep: ClassVar[bool]
    """Whether the steps of one turn of the request belong together."""

    def add_sample(self) -> None:
        """Called once for each sample, before any of them waits for a phase."""
        ...

    async def wait_for_phase(self) -> None:
        """Returns when the calling sample may begin its next phase."""
        ...

    def remove_sample(self) -> None:
        """Called once for each sample, after it has ended or was cancelled."""
        ...


class AsyncSchedule(Schedule):
    """No sample waits for another."""

    in_lockstep = False

    def add_sample(self) -> None:
        pass

    async def wait_for_phase(self) -> None:
        pass

    def remove_sample(self) -> None:
        pass


class LockstepSchedule(Schedule):
    """A phase begins when all samples that are not done wait for it.

    Its samples begin it in consecutive iterations of the event loop, `EPISODES_PER_ITERATION` in each.
    """

    in_lockstep = True

    def __init__(self) -> None:
        self._samples = 0
        self._waiting: dict[asyncio.Future[None], None] = {}
        """Samples that wait, in the order in which they came."""
        self._beginning = PacedWork[asyncio.Future[None]]()

    def add_sample(self) -> None:
        self._samples += 1

    async def wait_for_phase(self) -> None:
        phase = asyncio.get_running_loop().create_future()
        self._waiting[phase] = None
        self._begin_phase_if_all_wait()
        try:
            await phase
        except asyncio.CancelledError:
            self._waiting.pop(phase, None)
            raise

    def remove_sample(self) -> None:
        self._samples -= 1
        self._begin_phase_if_all_wait()

    def _begin_phase_if_all_wait(self) -> None:
        if len(self._waiting) < self._samples:
            return
        # The future of a cancelled sample is done before the sample's task runs and removes it.
        waiting = [phase for phase in self._waiting if not phase.done()]
        if len(waiting) >= self._samples:
            self._waiting = {}
            self._beginning.add(begin, waiting)


def begin(phase: "asyncio.Future[None]") -> None:
    """Lets the phase's sample go on, unless it was cancelled."""
    if not phase.done():
        phase.set_result(None)
