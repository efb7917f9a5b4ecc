"""Plays samples in chunks, several requests at a time, under a live bar, into memory or a file.

`rollout run`, `eval` and `bench` play through it.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout_client.calls.async_client.client import AsyncRolloutClient
from rollout_client.calls.progress import rollout_bar
from rollout_client.calls.rollouts import RolloutOptions
from rollout_client.cli.run.plan import INPUT_ROW, RunPlan
from rollout_client.cli.run.results_file import GroupWriter, ResultsFile, run_of
from rollout_client.cli.run.totals import Totals
from rollout_client.contract.base import set_fields
from rollout_client.contract.problems import FieldProblem
from rollout_client.contract.rollouts import SampleResult
from rollout_client.data_out.files import read_rollouts
from rollout_client.errors import RequestRejected, StreamBroken

INDEX = re.compile(r"^samples\[(\d+)\]")
CHUNKS_IN_FLIGHT = 4
"""So many requests at once: while one waits for its last rollouts, the others keep the engines busy."""


class ChunkPlayer:
    """
    Args:
        samples: by row.
        chunk_size: samples of one request.
        retries: how often in a row a stream may break without a group having ended.
        on_group: is given the row and its group, whole, and awaited.
    """

    def __init__(
        self,
        client: AsyncRolloutClient,
        samples: Sequence[Mapping[str, Any]],
        options: RolloutOptions,
        plan: RunPlan,
        *,
        chunk_size: int,
        retries: int,
        on_group: Callable[[int, list[SampleResult]], Awaitable[None]],
    ) -> None:
        self._client = client
        self._samples = samples
        self._options = options
        self._plan = plan
        self._chunk_size = chunk_size
        self._retries = retries
        self._on_group = on_group
        self._breaks = 0

    async def play(self) -> None:
        """Raises what the first request to fail raised, after the others were ended."""
        workers = [asyncio.create_task(self._play_chunks()) for _ in range(CHUNKS_IN_FLIGHT)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def _play_chunks(self) -> None:
        while rows := self._plan.next_chunk(self._chunk_size):
            try:
                await self._play_chunk(rows)
            except RequestRejected as error:
                raise naming_rows(error, rows) from error
            except StreamBroken:
                self._breaks += 1
                if self._breaks > self._retries:
                    raise
            finally:
                self._plan.give_back(rows)

    async def _play_chunk(self, rows: Sequence[int]) -> None:
        samples = [self._samples[row] for row in rows]
        generations = self._options.get("num_generations") or 1
        async with self._client.stream(samples, **self._options) as rollouts:
            async for position, sample in rollouts.with_positions():
                row = rows[position // generations]
                group = self._plan.add(row, sample)
                if group is not None:
                    self._breaks = 0
                    await self._on_group(row, group)


def naming_rows(error: RequestRejected, rows: Sequence[int]) -> RequestRejected:
    """The same with the rows of the input in place of the indices in the request."""

    def named(field: str) -> str:
        return INDEX.sub(lambda found: f"row {rows[int(found[1])]}" if int(found[1]) < len(rows) else found[0], field)

    errors = [FieldProblem(**{**set_fields(found), "field": named(found.field)}) for found in error.problem.errors]
    return RequestRejected(error.problem.model_copy(update={"errors": errors}), error.retry_after_s)


OnGroup = Callable[[int, list[SampleResult]], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Playing:
    """
    Args:
        samples: by row.
        chunk_size: samples of one request.
        retries: how often in a row streams may break.
    """

    client: AsyncRolloutClient
    samples: Sequence[Mapping[str, Any]]
    options: RolloutOptions
    chunk_size: int
    retries: int

    def play(self, on_group: OnGroup, totals: Totals, done: Set[int] = frozenset()) -> None:
        """Plays the rows that are not `done` and counts them in `totals`; raises what a request raises."""
        asyncio.run(self._play(on_group, totals, done))

    async def _play(self, on_group: OnGroup, totals: Totals, done: Set[int]) -> None:
        generations = self.options.get("num_generations") or 1

        with rollout_bar(len(self.samples) * generations, len(done) * generations) as show:

            async def counted(row: int, group: list[SampleResult]) -> None:
                await on_group(row, group)
                for sample in group:
                    totals.add_result(sample)
                    show(sample)

            async with self.client:
                player = ChunkPlayer(
                    self.client,
                    self.samples,
                    self.options,
                    RunPlan(len(self.samples), generations, done),
                    chunk_size=self.chunk_size,
                    retries=self.retries,
                    on_group=counted,
                )
                await player.play()


def play_to_file(playing: Playing, path: Path, overwrite: bool) -> Totals:
    """Plays what the file at `path` does not have yet, and counts all that it has then.

    Raises `ValueError` if the file is of another run, `OSError`, and what a request raises.
    """
    with ResultsFile(path, run_of(playing.samples, playing.options), overwrite) as file:
        found = file.recover(playing.options.get("num_generations") or 1)
        try:
            playing.play(GroupWriter(file).write, found.totals, found.rows)
        except KeyboardInterrupt as error:
            raise ValueError(f"Stopped: {path} has what had ended, and the same command goes on.") from error
    return found.totals


def play_in_memory(playing: Playing, totals: Totals) -> list[list[SampleResult]]:
    """The rollouts of each row."""
    groups: dict[int, list[SampleResult]] = {}

    async def keep(row: int, group: list[SampleResult]) -> None:
        groups[row] = group

    playing.play(keep, totals)
    return [groups[row] for row in sorted(groups)]


def groups_in(path: Path) -> list[list[SampleResult]]:
    """The rollouts of each row in a file of results."""
    groups: dict[int, list[SampleResult]] = {}
    for sample in read_rollouts(path):
        groups.setdefault((sample.model_extra or {})[INPUT_ROW], []).append(sample)
    return [groups[row] for row in sorted(groups)]
