"""When episodes go on: over the iterations of the event loop, so that no iteration is long, and by schedules.

When one message brings the results of thousands of generations, all their episodes could go on in one iteration, and
nothing else would run for a second.

A schedule says when the samples of a request may begin their next phase, each on its own or all together. A phase is a
generation or an environment step.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from typing import ClassVar, Generic, TypeVar

Item = TypeVar("Item")
EPISODES_PER_ITERATION = 64
"""Half a turn of an episode takes about 0.1 ms: an iteration with this many takes about 6 ms. Fewer would make the
batches of calls, which are made once per iteration, smaller than an engine can use."""
TOKENS_PER_EPISODE = 1024
"""Tokens that take as long to decode and to copy as the rest of half a turn."""


class LoopPacer:
    """Lets at most `per_iteration` episodes go on in one iteration of the event loop; the others wait in order.

    An episode with many new tokens counts for several. One pacer serves all requests of an event loop. It adds no
    delay while fewer go on.
    """

    def __init__(self, per_iteration: int = EPISODES_PER_ITERATION) -> None:
        self._per_iteration = per_iteration
        self._is_counting = False
        self._used = 0
        """Shares of the episodes that have gone on in this iteration."""
        self._used_of_next = 0
        """Shares of those that were woken, and go on at the begin of the next one."""
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()
        """Futures of the episodes that wait, with their shares."""
        self._episodes: set[Hashable] = set()
        """The episodes that wait."""

    def is_waiting(self, episode: Hashable) -> bool:
        return episode in self._episodes

    async def wait_for_turn(self, episode: Hashable, new_tokens: int = 0) -> None:
        """Returns when the episode, which then takes in `new_tokens`, may go on."""
        share = 1 + new_tokens // TOKENS_PER_EPISODE
        loop = asyncio.get_running_loop()
        if not self._is_counting:
            self._is_counting = True
            loop.call_soon(self._begin_iteration)
        if self._used < self._per_iteration and not self._waiting:
            self._used += share
            return
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.append((turn, share))
        self._episodes.add(episode)
        try:
            await turn
        finally:
            self._episodes.discard(episode)

    def _begin_iteration(self) -> None:
        """Runs right after the episodes that the call before has woken."""
        self._used, self._used_of_next = self._used_of_next, 0
        while self._waiting and self._used_of_next < self._per_iteration:
            turn, share = self._waiting.popleft()
            # The turn of a cancelled episode goes to the next one.
            if not turn.done():
                turn.set_result(None)
                self._used_of_next += share
        self._is_counting = self._used + self._used_of_next > 0
        if self._is_counting:
            asyncio.get_running_loop().call_soon(self._begin_iteration)


class PacedWork(Generic[Item]):
    """Calls functions with items, in order, at most `per_iteration` in one iteration of the event loop.

    The first calls are made at once, inside `add`, and the others in the iterations that follow. A function is
    referenced no longer than its items wait: it may be a method of the object that holds this one.
    """

    def __init__(self, per_iteration: int = EPISODES_PER_ITERATION) -> None:
        self._per_iteration = per_iteration
        self._waiting: deque[tuple[Callable[[Item], None], Item]] = deque()
        """The items whose turn has not come, each with its function."""
        self._rest: asyncio.Task[None] | None = None

    def add(self, do: Callable[[Item], None], items: Iterable[Item]) -> None:
        self._waiting.extend((do, item) for item in items)
        if self._rest is None:
            self._do_some()
        if self._waiting and self._rest is None:
            self._rest = asyncio.create_task(self._do_rest())

    async def finish(self) -> None:
        """Returns when no item waits."""
        if self._rest is not None:
            await asyncio.wait([self._rest])

    async def _do_rest(self) -> None:
        while self._waiting:
            self._do_some()
            await asyncio.sleep(0)
        self._rest = None

    def _do_some(self) -> None:
        for _ in range(min(self._per_iteration, len(self._waiting))):
            do, item = self._waiting.popleft()
            do(item)


class Schedule:
    """When the samples of one request may begin their next phase: here each on its own."""

    in_lockstep: ClassVar[bool] = False
    """Whether the steps of one turn of the request belong together."""

    def add_sample(self) -> None:
        """Called once for each sample, before any of them waits for a phase."""

    async def wait_for_phase(self) -> None:
        """Returns when the calling sample may begin its next phase."""

    def remove_sample(self) -> None:
        """Called once for each sample, after it has ended or was cancelled."""


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
            self._beginning.add(_begin, waiting)


def _begin(phase: "asyncio.Future[None]") -> None:
    """Lets the phase's sample go on, unless it was cancelled."""
    if not phase.done():
        phase.set_result(None)
