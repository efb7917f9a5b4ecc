"""Plays samples in chunks under a live bar, into memory or a file: what `run`, `eval` and `bench` have in common."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout_client.calls.async_client.client import AsyncRolloutClient
from rollout_client.calls.progress import rollout_bar
from rollout_client.calls.rollouts import RolloutOptions
from rollout_client.cli.run.group_writer import GroupWriter
from rollout_client.cli.run.plan import INPUT_ROW, RunPlan
from rollout_client.cli.run.player import ChunkPlayer
from rollout_client.cli.run.results_file import ResultsFile, run_of
from rollout_client.cli.run.totals import Totals
from rollout_client.contract.rollouts import SampleResult
from rollout_client.data_out.files import read_rollouts

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
