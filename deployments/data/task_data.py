"""The samples of one task's data set: its splits, their shuffled epochs, and pages of them.

Guarantees: the place of a sample is a number from 0 that grows through all epochs; equal split, shuffle seed and place
give the same sample, in every process; an epoch has each row of its split once.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
from pydantic_core import to_json

from deployments.data.columns import SampleColumns
from deployments.data.failures import DataRefused
from deployments.data.permutation import Permutation, Places
from deployments.data.rows import Rows

REVISION_BYTES = 8
ROWS_AT_ONCE = 64
"""Rows that are read together: a page that is bounded in bytes reads at most so many too many."""


@dataclass(frozen=True, slots=True)
class Split:
    """A part of the rows of a file or data set."""

    source: str
    """The split that the files or the data set call so; another one if this one was held out of it."""
    rows: Rows
    size: int
    first: int = 0
    """Where it begins among the rows, in the order that `held_out` makes."""
    held_out: Permutation | None = None
    """The order of the rows of which some are held out."""
    held_out_seed: int | None = None
    """What chose that order."""

    def numbers(self, places: Places) -> list[int]:
        """The numbers of the rows at these places of the split."""
        chosen = places + np.uint64(self.first)
        numbers: list[int] = (chosen if self.held_out is None else self.held_out(chosen)).tolist()
        return numbers


class TaskData:
    """The data of one task, ready to be read."""

    def __init__(
        self, task_name: str, splits: Mapping[str, Split], columns: SampleColumns, shuffle_seed: int | None
    ) -> None:
        self.splits = splits
        self._task_name = task_name
        self._columns = columns
        self._shuffle_seed = shuffle_seed

    @property
    def sizes(self) -> dict[str, int]:
        """Rows by split; the first is the one that is meant where none is named."""
        return {name: split.size for name, split in self.splits.items()}

    def samples(self, split: str | None, start: int, count: int, shuffle_seed: int | None) -> Iterator[bytes]:
        """The JSON of the samples at places `start` to `start + count - 1`, each without a newline.

        Args:
            split: by default the first one.
            shuffle_seed: by default that of the config; without one, samples come in the order of the rows.

        Raises:
            DataRefused: there is no such split, or a row is no sample.
        """
        chosen = self._split(split)
        seed = self._shuffle_seed if shuffle_seed is None else shuffle_seed
        for begin in range(start, start + count, ROWS_AT_ONCE):
            places = np.arange(begin, min(begin + ROWS_AT_ONCE, start + count), dtype=np.uint64)
            numbers = chosen.numbers(shuffled(places, chosen.size, seed))
            for number, sample in zip(numbers, self.read(chosen, numbers), strict=True):
                yield encoded(sample, chosen.rows.place_of(number))

    def revision(self, split: str | None, shuffle_seed: int | None) -> str:
        """Of which rows are at which places of a split, and what becomes of them. Equal revisions give equal samples.

        Takes a second for a gigabyte of JSON lines, the first time. Args, and what is raised: as `samples`.
        """
        chosen = self._split(split)
        seed = self._shuffle_seed if shuffle_seed is None else shuffle_seed
        order = (chosen.source, chosen.size, chosen.first, chosen.held_out_seed, seed)
        parts = (chosen.rows.digest, self._columns.fingerprint, repr(order).encode())
        return blake2b(b"\0".join(parts), digest_size=REVISION_BYTES).hexdigest()

    def read(self, split: Split, numbers: list[int]) -> Iterator[dict[str, Any]]:
        """The samples of these rows. Raises `DataRefused`."""
        for number, row in zip(numbers, split.rows.read(numbers), strict=True):
            try:
                sample = self._columns.sample(row)
            except ValueError as error:
                raise DataRefused(f"{split.rows.place_of(number)}: {error}") from error
            yield {"id": f"{split.source}/{number}"} | sample | {"task_name": self._task_name}

    def _split(self, name: str | None) -> Split:
        if name is None:
            return next(iter(self.splits.values()))
        if name not in self.splits:
            known = ", ".join(self.splits)
            raise DataRefused(f"task {self._task_name!r} has no split {name!r}; it has {known}", "split", name)
        return self.splits[name]


def shuffled(places: Places, size: int, seed: int | None) -> Places:
    """Places of a split, from places that count through all its epochs."""
    epochs, within = np.divmod(places, np.uint64(size))
    if seed is None:
        return within
    for epoch in np.unique(epochs).tolist():
        chosen = epochs == epoch
        within[chosen] = Permutation(size, (seed, epoch))(within[chosen])
    return within


def encoded(sample: dict[str, Any], place: str) -> bytes:
    try:
        return to_json(sample)
    except ValueError as error:
        raise DataRefused(f"{place} has a value that JSON does not have: {error}") from error
