"""The rows of files and of data sets, by their number. Nothing but an index is held in memory.

JSON lines are read as they are: a library that makes columns of them would refuse rows whose fields differ in type,
and fill in fields that a row does not have.
"""

import mmap
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

from deployments.data.reader import DataRefused
from rollout_client.json_lines import BYTE_ORDER_MARK, without_nulls

if TYPE_CHECKING:
    from datasets import Dataset

SCANNED_BYTES = 2**24
MOST_DIGESTED_ROWS = 1024
"""Rows that the digest of a data set reads, because reading all of a large one takes minutes."""
DIGEST_BYTES = 16
NEWLINE, RETURN = 10, 13
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
        self._files = [_JsonLinesFile(path) for path in paths]
        self._ends = list(accumulate(len(file) for file in self._files))

    def __len__(self) -> int:
        return self._ends[-1]

    @cached_property
    def digest(self) -> bytes:
        return blake2b(b"".join(file.digest() for file in self._files), digest_size=DIGEST_BYTES).digest()

    def read(self, numbers: Sequence[int]) -> list[Row]:
        return [file.row(place) for file, place in map(self._placed, numbers)]

    def place_of(self, number: int) -> str:
        file, place = self._placed(number)
        return file.place_of(place)

    def _placed(self, number: int) -> tuple["_JsonLinesFile", int]:
        index = bisect_right(self._ends, number)
        return self._files[index], number - (self._ends[index - 1] if index else 0)


class _JsonLinesFile:
    """One file, and where its lines begin and end: 16 bytes a line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._content = _mapped(path)
        ends = _line_ends(self._content)
        begins = np.concatenate([np.zeros(1, np.int64), ends[:-1] + 1])[: len(ends)]
        if self._content[: len(BYTE_ORDER_MARK)] == BYTE_ORDER_MARK:
            begins[0] = len(BYTE_ORDER_MARK)
        content = np.frombuffer(self._content, np.uint8)
        # A mark without a newline is a line that begins where the content ends.
        first_bytes = content[np.minimum(begins, len(content) - 1)] if len(content) else content
        lines = np.flatnonzero((ends > begins) & ~((ends - begins == 1) & (first_bytes == RETURN)))
        self._begins, self._ends = begins[lines], ends[lines]
        self._lines = None if len(lines) == len(ends) else lines

    def __len__(self) -> int:
        return len(self._begins)

    def digest(self) -> bytes:
        """About a second for a gigabyte."""
        return blake2b(self._content, digest_size=DIGEST_BYTES).digest()

    def row(self, place: int) -> Row:
        line = self._content[int(self._begins[place]) : int(self._ends[place])]
        try:
            row = from_json(line)
        except ValueError as error:
            raise DataRefused(f"{self.place_of(place)} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise DataRefused(f"{self.place_of(place)} is not a JSON object")
        return row

    def place_of(self, place: int) -> str:
        return f"{self._path} line {(place if self._lines is None else int(self._lines[place])) + 1}"


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


def _line_ends(content: mmap.mmap | bytes) -> npt.NDArray[np.int64]:
    """Where each line ends: the offset of its newline, or the end of a content that ends without one."""
    found = [
        np.flatnonzero(np.frombuffer(content, np.uint8, min(SCANNED_BYTES, len(content) - begin), begin) == NEWLINE)
        + begin
        for begin in range(0, len(content), SCANNED_BYTES)
    ]
    ends: npt.NDArray[np.int64] = np.concatenate([np.zeros(0, np.int64), *found])
    if len(content) and content[-1] != NEWLINE:
        return np.append(ends, np.int64(len(content)))
    return ends
