"""The generations that run in one engine, and which of them have no progress."""

import asyncio
import time
from collections.abc import Iterable, Iterator, Sequence
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
    _tokens: int | None = None
    _progress_at: float = 0.0
    """Since when it has no more than these tokens."""

    def has_stalled(self, now: float, tokens: int, engine_moved: bool, is_paused: bool) -> bool:
        """Whether it had no progress for `token_timeout_s`, by observations that the caller makes every second.

        Progress is a new token. Before its first token it waits for others, or its prompt is computed in several steps:
        then a step of the engine is its progress. While the engine is paused, time does not count.

        Args:
            now: seconds of a monotonic clock.
            tokens: how many it has generated.
            engine_moved: whether the engine has taken a step since the last observation.
            is_paused: whether the engine is paused on purpose.
        """
        if is_paused or tokens != self._tokens or (engine_moved and not tokens):
            self._tokens, self._progress_at = tokens, now
        timeout_s = self.request.token_timeout_s
        return timeout_s is not None and now - self._progress_at >= timeout_s

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
        self._steps_seen = 0
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
        steps, is_paused, now = self._steps.taken, self._weights.is_paused, time.monotonic()
        engine_moved, self._steps_seen = steps != self._steps_seen, steps
        for engine_id, tokens in self._progress.tokens(list(self._by_engine_id)).items():
            generation = self._by_engine_id.get(engine_id)
            if generation is not None and generation.has_stalled(now, tokens, engine_moved, is_paused):
                timeout_s = generation.request.token_timeout_s
                await self._interrupt(
                    [generation], TurnTimedOut(f"The generation had no new token for {timeout_s:g} s.")
                )

    def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
