"""Appends groups to the file of results; those that end while the disk is busy are written together."""

import asyncio

from rollout_client.cli.run.plan import INPUT_ROW
from rollout_client.cli.run.results_file import ResultsFile
from rollout_client.contract.rollouts import SampleResult
from rollout_client.data_out.files import json_line


class GroupWriter:
    def __init__(self, file: ResultsFile) -> None:
        self._file = file
        self._waiting: list[bytes] = []
        self._is_writing = asyncio.Lock()

    async def write(self, row: int, group: list[SampleResult]) -> None:
        """Returns when the group is on the disk."""
        self._waiting.extend(json_line(sample, **{INPUT_ROW: row}) for sample in group)
        async with self._is_writing:
            lines, self._waiting = self._waiting, []
            if lines:
                await asyncio.to_thread(self._file.append, b"".join(lines))
