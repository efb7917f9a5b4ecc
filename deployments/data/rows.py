"""The port to the data of the tasks, and the rows of files and of data sets, by their number.

`RemoteData` (`service/remote/environment.py`) implements the port. Nothing but an index of the rows is held in memory.

JSON lines are read as they are: a library that makes columns of them would refuse rows whose fields differ in type,
and fill in fields that a row does not have.
"""

import mmap
import re
from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property
from hashlib import blake2b
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
from pydantic_core import from_json, to_json

from rollout_client.json_lines import BYTE_ORDER_MARK, without_nulls

if TYPE_CHECKING:
    from datasets import Dataset
from collections.abc import AsyncGenerator, Iterable, Iterator

from rollout_client.contract.selection import SampleRange


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


LINE = re.compile(rb"[^\r\n][^\n]*")
MOST_DIGESTED_ROWS = 1024
"""Rows that the digest of a data set reads, because reading all of a large one takes minutes."""
DIGEST_BYTES = 16
Row = dict[str, Any]


class Rows(Protocol):
    """The rows of one split."""

    def __len__(self) -> int: ...

    @property
    def digest(self) -> bytes:
        """Digest of their content, the same on every machine. Computed at the first access."""
        ...

    def read(self, numbers: Sequence[int]) -> list[Row]:
        """The rows with these numbers, from 0. Raises `DataRefused` if one cannot be read."""
        ...

    def place_of(self, number: int) -> str:
        """Where the row is, for a sentence: `data/train.jsonl line 17`."""
        ...


class JsonLines(Rows):
    """The lines of JSON Lines files that are not empty. The files are mapped into memory, not read."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """Raises `OSError` if a file cannot be read."""
        self._files = [(path, _mapped(path)) for path in paths]
        spans = [_line_spans(content) for _, content in self._files]
        self._ends = list(accumulate(map(len, spans)))
        self._spans = np.concatenate(spans)
        """Where each line begins and ends within its file: 16 bytes a line."""

    def __len__(self) -> int:
        return len(self._spans)

    @cached_property
    def digest(self) -> bytes:
        """About a second for a gigabyte."""
        digests = (blake2b(content, digest_size=DIGEST_BYTES).digest() for _, content in self._files)
        return blake2b(b"".join(digests), digest_size=DIGEST_BYTES).digest()

    def read(self, numbers: Sequence[int]) -> list[Row]:
        return [self._row(number) for number in numbers]

    def place_of(self, number: int) -> str:
        path, content = self._files[bisect_right(self._ends, number)]
        lines_before = content[: self._spans[number, 0]].count(b"\n")
        return f"{path} line {lines_before + 1}"

    def _row(self, number: int) -> Row:
        _, content = self._files[bisect_right(self._ends, number)]
        begin, end = self._spans[number].tolist()
        try:
            row = from_json(content[begin:end])
        except ValueError as error:
            raise DataRefused(f"{self.place_of(number)} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise DataRefused(f"{self.place_of(number)} is not a JSON object")
        return row


class DatasetRows(Rows):
    """The rows of a data set of the library `datasets`, mapped into memory. A null is a missing field."""

    def __init__(self, dataset: "Dataset", name: str) -> None:
        self._dataset = dataset
        self._name = name

    def __len__(self) -> int:
        return len(self._dataset)

    @cached_property
    def digest(self) -> bytes:
        """Digest of their number and of up to `MOST_DIGESTED_ROWS` of them, which are spread evenly."""
        numbers = np.unique(np.linspace(0, len(self) - 1, MOST_DIGESTED_ROWS, dtype=np.int64)).tolist()
        rows = to_json([len(self), self.read(numbers)], serialize_unknown=True, bytes_mode="base64")
        return blake2b(rows, digest_size=DIGEST_BYTES).digest()

    def read(self, numbers: Sequence[int]) -> list[Row]:
        columns = self._dataset[list(numbers)]
        return [
            without_nulls({name: values[place] for name, values in columns.items()}) for place in range(len(numbers))
        ]

    def place_of(self, number: int) -> str:
        return f"{self._name} row {number}"


def _mapped(path: Path) -> mmap.mmap | bytes:
    with path.open("rb") as file:
        # An empty file cannot be mapped.
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if path.stat().st_size else b""


def _line_spans(content: mmap.mmap | bytes) -> npt.NDArray[np.int64]:
    begin = len(BYTE_ORDER_MARK) if content[: len(BYTE_ORDER_MARK)] == BYTE_ORDER_MARK else 0
    pair: Any = np.dtype((np.int64, 2))
    return np.fromiter((line.span() for line in LINE.finditer(content, begin)), pair)
