"""The deployment that holds the data sets of the tasks, if there are any.

`RemoteData` (`service/remote/data.py`) is the caller. Data are held here, and neither in the ingress replicas, whose
event loops must not stall, nor by the environments, of which there may be many. What is held is an index: the rows
stay in files that are mapped into memory, so that replicas on one node share what the system has read of them.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Mapping

from deployments import logs
from deployments.data.failures import DataNotLoadable
from deployments.data.loading import load_task_data
from deployments.data.reader import within_bytes
from deployments.data.settings import DataSettings

BYTES_PER_MESSAGE = 2**20


class DataStore:
    """One replica, which answers for every task that has data."""

    def __init__(self, settings: Mapping[str, DataSettings]) -> None:
        """Raises `DataNotLoadable`.

        Args:
            settings: by task.
        """
        logs.configure()
        self._data = {}
        for task_name, of_task in settings.items():
            try:
                self._data[task_name] = load_task_data(task_name, of_task)
            except DataNotLoadable as error:
                raise DataNotLoadable(f"args.environments.{task_name}.data: {error}") from error

    async def sizes(self) -> dict[str, dict[str, int]]:
        """Rows by split, by task."""
        return {task_name: data.sizes for task_name, data in self._data.items()}

    async def revision(self, task_name: str, split: str | None, shuffle_seed: int | None) -> str:
        """As `TaskData.revision`."""
        return await asyncio.to_thread(self._data[task_name].revision, split, shuffle_seed)

    async def samples(
        self, task_name: str, split: str | None, start: int, count: int, shuffle_seed: int | None, most_bytes: int
    ) -> AsyncGenerator[bytes, None]:
        """Yields parts of JSON lines, each a sample; fewer than `count` if they would take more than `most_bytes`.

        Raises:
            DataRefused: there is no such split, or a row is no sample.
        """
        lines = within_bytes(self._data[task_name].samples(split, start, count, shuffle_seed), most_bytes)
        messages = in_messages(lines)
        while message := await asyncio.to_thread(next, messages, b""):
            yield message


def in_messages(lines: Iterator[bytes]) -> Iterator[bytes]:
    """The lines in parts of `BYTES_PER_MESSAGE`, of which the last one is shorter."""
    part = bytearray()
    for line in lines:
        part += line + b"\n"
        while len(part) >= BYTES_PER_MESSAGE:
            yield bytes(part[:BYTES_PER_MESSAGE])
            del part[:BYTES_PER_MESSAGE]
    if part:
        yield bytes(part)
