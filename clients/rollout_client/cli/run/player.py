"""Plays samples in chunks, several requests at a time, under a live bar, into memory or a file.

`rollout run`, `eval` and `bench` play through it.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from rollout_client.calls.async_client.client import AsyncRolloutClient
from rollout_client.calls.progress import rollout_bar
from rollout_client.calls.rollouts import RolloutOptions, group_size
from rollout_client.cli.options import Connection
from rollout_client.cli.run.plan import RunPlan, input_row, with_seeds
from rollout_client.cli.run.results_file import ResultsFile, run_of
from rollout_client.cli.run.totals import Totals
from rollout_client.contract.base import FieldProblem, set_fields
from rollout_client.contract.rollouts import SampleResult
from rollout_client.data_out.files import read_rollouts
from rollout_client.errors import RequestRejected, StreamBroken

INDEX = re.compile(r"^samples\[(\d+)\]")
CHUNKS_IN_FLIGHT = 4
"""So many requests at once: while one waits for its last rollouts, the others keep the engines busy."""


class RunStopped(ValueError):
    """The user has stopped the run."""


OnGroup = Callable[[int, list[SampleResult]], Awaitable[None]]


class RunPlayer:
    """Plays the samples of a run, each row once.

    Args:
        samples: the samples by row.
        chunk_size: samples of one request.
    """

    def __init__(
        self, service: Connection, samples: Sequence[Mapping[str, Any]], options: RolloutOptions, chunk_size: int
    ) -> None:
        self.samples = with_seeds(samples, options)
        self.options = options
        self.group_size = group_size(options)
        self._service = service
        self._chunk_size = chunk_size
        self._breaks = 0
        """How often in a row a stream has broken without a group having ended."""

    def play(self, on_group: OnGroup, totals: Totals, done: Set[int] = frozenset()) -> None:
        """Plays the rows that are not `done` and counts them in `totals`; raises what a request raises.

        `on_group` is given each row with its group, whole, and awaited.
        """
        asyncio.run(self._play(on_group, totals, done))

    async def _play(self, on_group: OnGroup, totals: Totals, done: Set[int]) -> None:
        plan = RunPlan(len(self.samples), self.group_size, done)
        done_count = len(done) * self.group_size
        async with self._service.async_client() as client:
            with rollout_bar(len(self.samples) * self.group_size, done_count) as show:

                async def count(row: int, group: list[SampleResult]) -> None:
                    await on_group(row, group)
                    for sample in group:
                        totals.add(sample)
                        show(sample)

                workers = [asyncio.create_task(self._play_chunks(client, plan, count)) for _ in range(CHUNKS_IN_FLIGHT)]
                try:
                    await asyncio.gather(*workers)
                finally:
                    for worker in workers:
                        worker.cancel()
                    await asyncio.gather(*workers, return_exceptions=True)

    async def _play_chunks(self, client: AsyncRolloutClient, plan: RunPlan, on_group: OnGroup) -> None:
        while rows := plan.next_chunk(self._chunk_size):
            try:
                await self._play_chunk(client, plan, rows, on_group)
            except RequestRejected as error:
                raise _naming_rows(error, rows) from error
            except StreamBroken:
                self._breaks += 1
                if self._breaks > self._service.retries:
                    raise
            finally:
                plan.give_back(rows)

    async def _play_chunk(
        self, client: AsyncRolloutClient, plan: RunPlan, rows: Sequence[int], on_group: OnGroup
    ) -> None:
        async with client.stream([self.samples[row] for row in rows], **self.options) as rollouts:
            async for position, sample in rollouts.with_positions():
                row = rows[position // self.group_size]
                group = plan.add(row, sample)
                if group is not None:
                    self._breaks = 0
                    await on_group(row, group)


def _naming_rows(error: RequestRejected, rows: Sequence[int]) -> RequestRejected:
    """The same with the rows of the input in place of the indices in the request."""

    def named(field: str) -> str:
        return INDEX.sub(lambda found: f"row {rows[int(found[1])]}" if int(found[1]) < len(rows) else found[0], field)

    errors = [FieldProblem(**{**set_fields(found), "field": named(found.field)}) for found in error.problem.errors]
    return RequestRejected(error.problem.model_copy(update={"errors": errors}), error.retry_after_s)


def play_to_file(player: RunPlayer, path: Path, overwrite: bool) -> Totals:
    """Plays what the file at `path` does not have yet, and counts all that it has then.

    Raises `RunStopped`, `ValueError` if the file is of another run, `OSError`, and what a request raises.
    """
    with ResultsFile(path, run_of(player.samples, player.options), overwrite).locked() as file:
        found = file.recover(player.group_size)
        try:
            player.play(file.append, found.totals, found.rows)
        except KeyboardInterrupt as error:
            raise RunStopped(f"Stopped: {path} has what had ended, and the same command goes on.") from error
    return found.totals


def play_groups(player: RunPlayer, path: Path | None = None, overwrite: bool = False) -> list[list[SampleResult]]:
    """The rollouts of each row; with a path they are kept in that file too, and what it has is not played again."""
    groups: dict[int, list[SampleResult]] = {}
    if path is not None:
        play_to_file(player, path, overwrite)
        for sample in read_rollouts(path):
            groups.setdefault(input_row(sample), []).append(sample)
        return list(groups.values())

    async def keep(row: int, group: list[SampleResult]) -> None:
        groups[row] = group

    player.play(keep, Totals())
    return list(groups.values())
