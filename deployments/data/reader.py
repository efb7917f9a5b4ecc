"""The port to the data of the tasks: `DataReader`. `RemoteData` (`service/remote/data.py`) implements it."""

from collections.abc import AsyncGenerator, Iterable, Iterator
from typing import Protocol

from rollout_client.sample_range_contract import SampleRange


class DataReader(Protocol):
    async def sizes(self) -> dict[str, dict[str, int]]:
        """Rows by split, by task that has data; the first split is meant where none is named. Raises `DataLost`."""
        ...

    async def revision(self, wanted: SampleRange) -> str:
        """Of the data behind the range: another one where its places may have other samples.

        Raises:
            DataRefused: there is no such split.
            DataLost: the data cannot be reached.
        """
        ...

    def samples(self, wanted: SampleRange, most_bytes: int) -> AsyncGenerator[bytes, None]:
        """Yields parts of JSON lines, each a sample of a task that has data.

        They are fewer than wanted if they would take more than `most_bytes`.

        Raises:
            DataRefused: there is no such split, or a row is no sample.
            DataLost: the data cannot be reached.
        """
        ...


def within_bytes(samples: Iterable[bytes], most_bytes: int) -> Iterator[bytes]:
    """As many of the samples as take no more bytes, and at least one."""
    size = 0
    for sample in samples:
        size += len(sample) + 1
        if size > most_bytes and size > len(sample) + 1:
            return
        yield sample
