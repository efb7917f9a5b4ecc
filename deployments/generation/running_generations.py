"""The generations that run in one engine, and which of them have no progress. No I/O, no vLLM."""

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count

from deployments.failures import RolloutFailure
from deployments.protocols.generation import GenerationRequest


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


class RunningGenerations:
    """Finds generations by their ids."""

    def __init__(self) -> None:
        self._by_engine_id: dict[str, RunningGeneration] = {}
        self._numbers = count()

    def __iter__(self) -> Iterator[RunningGeneration]:
        return iter(self._by_engine_id.values())

    def __len__(self) -> int:
        return len(self._by_engine_id)

    @contextmanager
    def running(self, request: GenerationRequest) -> Iterator[RunningGeneration]:
        """The generation runs for the length of the block."""
        generation = RunningGeneration(request, f"{request.generation_id}.{next(self._numbers)}")
        self._by_engine_id[generation.engine_id] = generation
        try:
            yield generation
        finally:
            del self._by_engine_id[generation.engine_id]

    def of_ids(self, generation_ids: Iterable[str]) -> list[RunningGeneration]:
        """Those of these `generation_id`s; unknown ids are ignored."""
        wanted = set(generation_ids)
        return [generation for generation in self if generation.request.generation_id in wanted]


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
