"""The generations that run in one engine, and which of them have no progress."""

import asyncio
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

from deployments.failures import RolloutFailure, TurnTimedOut
from deployments.protocols.generation import GenerationRequest

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

    from deployments.generation.weight_updater import WeightUpdater
    from deployments.upstream.vllm.engine_progress import EngineProgress, StepCounter

WATCH_EVERY_S = 1.0


@dataclass(slots=True, eq=False)
class RunningGeneration:
    """One generation between its arrival and its result."""

    request: GenerationRequest
    engine_id: str
    """Its id in the engine: unique, while a retry has the `generation_id` of the generation that it repeats."""
    interrupted: asyncio.Event = field(default_factory=asyncio.Event)
    failure: RolloutFailure | None = None
    """Why it was interrupted; `None` if it can go on here."""

    def interrupt(self, failure: RolloutFailure | None) -> None:
        self.failure = failure
        self.interrupted.set()

    async def wait_until_interrupted_or(self, event: asyncio.Event) -> None:
        """Returns when the event is set, or the generation is interrupted."""
        waiting = [asyncio.create_task(either.wait()) for either in (event, self.interrupted)]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()


@dataclass(frozen=True, slots=True)
class GenerationProgress:
    """How far a generation is: its tokens, and since when it has no more than these, in seconds of any clock."""

    tokens: int
    since: float


class GenerationWatch:
    """Finds the generations that had no progress for too long, from observations that the caller makes every second.

    Progress of a generation is a new token. Before its first token it waits for others, or its prompt is computed in
    several steps: then a step of the engine is its progress. While the engine is paused, time does not count.
    """

    def __init__(self) -> None:
        self._progress: dict[str, GenerationProgress] = {}
        self._engine_steps = 0

    def stalled(
        self,
        now: float,
        tokens: Mapping[str, int],
        timeouts_s: Mapping[str, float | None],
        engine_steps: int,
        is_paused: bool,
    ) -> list[str]:
        """The ids of the generations that had no progress for as long as their timeout.

        Args:
            now: seconds of a monotonic clock.
            tokens: of each generation that runs or waits in the engine, how many it has generated.
            timeouts_s: of the same generations; `None` for no limit.
            engine_steps: how many steps the engine has taken so far.
            is_paused: whether the engine is paused on purpose.
        """
        engine_moved = engine_steps != self._engine_steps or is_paused
        before, self._progress, self._engine_steps = self._progress, {}, engine_steps
        stalled = []
        for name, generated in tokens.items():
            last = before.get(name)
            if last is None or is_paused or generated != last.tokens or (engine_moved and not generated):
                last = GenerationProgress(generated, now)
            self._progress[name] = last
            timeout_s = timeouts_s[name]
            if timeout_s is not None and now - last.since >= timeout_s:
                stalled.append(name)
        return stalled


class RunningGenerations:
    """Finds generations by their ids, and interrupts those that stall."""

    def __init__(
        self, llm: "AsyncLLM", progress: "EngineProgress", steps: "StepCounter", weights: "WeightUpdater"
    ) -> None:
        self._llm = llm
        self._progress = progress
        self._steps = steps
        self._weights = weights
        self._by_engine_id: dict[str, RunningGeneration] = {}
        self._numbers = count()
        self._stall_watch = GenerationWatch()
        self._watching: asyncio.Task[None] | None = None

    def __iter__(self) -> Iterator[RunningGeneration]:
        return iter(self._by_engine_id.values())

    def __len__(self) -> int:
        return len(self._by_engine_id)

    @contextmanager
    def running(self, request: GenerationRequest) -> Iterator[RunningGeneration]:
        """The generation runs for the length of the block: it can be interrupted, and is when it stalls."""
        generation = RunningGeneration(request, f"{request.generation_id}.{next(self._numbers)}")
        self._by_engine_id[generation.engine_id] = generation
        if request.token_timeout_s is not None and self._watching is None:
            self._watching = asyncio.create_task(self._watch())
        try:
            yield generation
        finally:
            del self._by_engine_id[generation.engine_id]

    async def interrupt(self, generation_ids: Iterable[str], failure: RolloutFailure | None = None) -> None:
        """Ends those of these `generation_id`s, with the tokens that they have. Unknown ids are ignored.

        Args:
            failure: as in `RunningGeneration`.
        """
        wanted = set(generation_ids)
        await self._interrupt([one for one in self if one.request.generation_id in wanted], failure)

    async def _interrupt(self, generations: Sequence[RunningGeneration], failure: RolloutFailure | None) -> None:
        for generation in generations:
            generation.interrupt(failure)
        if generations:
            # vLLM returns the tokens that it has, also when its engine process hangs.
            await self._llm.abort([generation.engine_id for generation in generations])

    async def _watch(self) -> None:
        """Interrupts the generations that stall, while any run."""
        try:
            while self:
                await asyncio.sleep(WATCH_EVERY_S)
                await self._interrupt_stalled()
        finally:
            self._watching = None

    async def _interrupt_stalled(self) -> None:
        running = {generation.engine_id: generation for generation in self}
        tokens = self._progress.tokens(running)
        timeouts_s = {name: running[name].request.token_timeout_s for name in tokens}
        steps, is_paused = self._steps.taken, self._weights.is_paused
        for name in self._stall_watch.stalled(time.monotonic(), tokens, timeouts_s, steps, is_paused):
            failure = TurnTimedOut(f"The generation had no new token for {timeouts_s[name]:g} s.")
            await self._interrupt([running[name]], failure)

    def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
