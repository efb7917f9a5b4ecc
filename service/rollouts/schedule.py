"""When the turns of a request's samples may go on: each by itself, or all of them in step."""

import asyncio
from typing import Protocol


class Schedule(Protocol):
    def join(self) -> None:
        """A sample takes part from now on."""

    async def phase(self) -> None:
        """Returns when the sample may begin its next phase, a generation or a step."""

    def leave(self) -> None:
        """The sample is over; nobody waits for it any more."""


class AsyncSchedule(Schedule):
    """Nothing waits for a slower sibling."""

    def join(self) -> None:
        pass

    async def phase(self) -> None:
        pass

    def leave(self) -> None:
        pass


class LockstepSchedule(Schedule):
    """A phase begins when every sample that is not over is ready for it.

    All waiting samples wake in the same instant, so that what they ask for next can travel in one call.
    """

    def __init__(self) -> None:
        self._playing = 0
        self._waiting: list[asyncio.Future[None]] = []

    def join(self) -> None:
        self._playing += 1

    async def phase(self) -> None:
        ready = asyncio.get_running_loop().create_future()
        self._waiting.append(ready)
        self._wake_if_all_wait()
        try:
            await ready
        except asyncio.CancelledError:
            if ready in self._waiting:
                self._waiting.remove(ready)
            raise

    def leave(self) -> None:
        self._playing -= 1
        self._wake_if_all_wait()

    def _wake_if_all_wait(self) -> None:
        # A cancelled sample's future is done before its task wakes to take it out and to leave.
        waiting = [ready for ready in self._waiting if not ready.done()]
        if len(waiting) >= self._playing:
            self._waiting = []
            for ready in waiting:
                ready.set_result(None)
