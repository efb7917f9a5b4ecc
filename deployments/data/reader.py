"""The port to the data of the tasks, `DataReader`, and its failures.

`RemoteData` (`service/remote/environment.py`) implements it.
"""

from collections.abc import AsyncGenerator, Iterable, Iterator
from typing import Protocol

from rollout_client.contract.sample_ranges import SampleRange


class DataNotLoadable(Exception):
    """The config names data that cannot be read, or whose rows are not samples. The message is a
    sentence, which begins with the setting or the row."""


class DataRefused(Exception):
    """The data cannot give the samples that were asked for. The message says why and what to do.

    Attributes:
        field: of the `SampleRange` that is at fault; empty if it is the data.
        value: of that field.
    """

    def __init__(self, message: str, field: str = "", value: str | int | None = None) -> None:
        self.field = field
        self.value = value
        super().__init__(message)

    def __reduce__(self) -> tuple[type["DataRefused"], tuple[str, str, str | int | None]]:
        # It travels between replicas: an exception is pickled with its message alone.
        return DataRefused, (str(self), self.field, self.value)


class DataReader(Protocol):
    async def sizes(self) -> dict[str, dict[str, int]]:
        """Rows by split, by task that has data; the first split is meant where none is named. Raises `DataLost`."""
        ...

    async def revision(self, wanted: SampleRange) -> str:
        """Revision of the data behind the range. Equal revisions have equal samples at equal places.

        Raises:
            DataRefused: there is no such split.
            DataLost: the data cannot be reached.
        """
        ...

    def samples(self, wanted: SampleRange, most_bytes: int) -> AsyncGenerator[bytes, None]:
        """Yields parts of JSON lines, each a sample of a task that has data.

        They are fewer than wanted if they would take more than `most_bytes`.

        Raises:
            DataRefused: there is no such split, or a row is not a sample.
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
