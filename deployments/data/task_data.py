"""The samples of one task's data set: rows to samples, splits, their shuffled epochs, and pages of them.

Guarantees: the place of a sample is a number from 0 that grows through all epochs; equal split, shuffle seed and place
give the same sample, in every process; an epoch has each row of its split once.

`SampleColumns` says which column becomes which field. `Permutation` shuffles without memory: the row at any place of a
shuffled epoch is computed from its place alone, equally in every process and with every version of the libraries. A
list of the shuffled rows would take 80 MB for ten million of them, and the time to make it, for each seed that a caller
names.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from pydantic_core import from_json, to_json

from deployments.data.rows import DataRefused, Row, Rows
from deployments.data.settings import PROMPT_PLACE, ColumnSettings, DataSettings
from rollout_client.contract.rollouts import SampleInput

SAMPLE_FIELDS = [name for name in SampleInput.model_fields if name != "task_name"]
MISSING = object()


class SampleColumns:
    """Makes samples of the rows of one data set."""

    def __init__(self, settings: DataSettings) -> None:
        self._settings = settings
        given = settings.columns or {name: name for name in SAMPLE_FIELDS} | {"prompt": "prompt"}
        self._sources = {
            target: ColumnSettings(column=source) if isinstance(source, str) else source
            for target, source in given.items()
        }

    @property
    def fingerprint(self) -> bytes:
        """Equal for columns that make equal samples of equal rows."""
        return self._settings.model_dump_json(include={"columns", "system_prompt", "prompt_template"}).encode()

    @property
    def named(self) -> list[tuple[str, str]]:
        """The fields and columns that the config names."""
        return [(target, self._sources[target].column) for target in self._settings.columns]

    def sample(self, row: Row) -> Row:
        """The fields of the sample, without its task. Columns that the row does not have are left out.

        Raises:
            ValueError: what is wrong with the row.
        """
        sample: Row = {}
        for target, source in self._sources.items():
            if (value := get_path(row, source.column)) is MISSING:
                continue
            *path, name = ("messages" if target == "prompt" else target).split(".")
            fields = sample
            for part in path:
                fields = fields.setdefault(part, {})
            fields[name] = _extract(source, value)
        if "messages" in sample:
            sample["messages"] = self._messages(sample["messages"])
        return sample

    def _messages(self, prompt: Any) -> Any:
        """The messages of a prompt that is a text or a list of them; anything else is left for validation to refuse."""
        if isinstance(prompt, str):
            template = self._settings.prompt_template or PROMPT_PLACE
            prompt = [{"role": "user", "content": template.replace(PROMPT_PLACE, prompt)}]
        if self._settings.system_prompt is not None and isinstance(prompt, list):
            return [{"role": "system", "content": self._settings.system_prompt}, *prompt]
        return prompt


def get_path(row: Row, path: str) -> Any:
    """The value of a column, or of a field inside one; `MISSING` if there is none."""
    if path in row:
        return row[path]
    first, _, rest = path.partition(".")
    inner = row.get(first)
    return get_path(inner, rest) if rest and isinstance(inner, dict) else MISSING


def _extract(source: ColumnSettings, value: Any) -> Any:
    """Raises `ValueError` if the value is not as the config says."""
    if (source.pattern is not None or source.parse_json) and not isinstance(value, str):
        raise ValueError(f"column {source.column!r} is not a text: {value!r:.80}")
    if source.pattern is not None:
        found = source.pattern.search(value)
        if found is None:
            raise ValueError(f"the pattern {source.pattern.pattern!r} is not found in column {source.column!r}")
        value = found[1] if found.re.groups else found[0]
    try:
        return from_json(value) if source.parse_json else value
    except (TypeError, ValueError) as error:
        # A group of the pattern that takes no part has no text.
        raise ValueError(f"column {source.column!r} is not JSON: {error}") from error


Places = npt.NDArray[np.uint64]
ROUNDS = 6


class Permutation:
    """A bijection of 0..size-1: a Feistel network over the next larger power of four.

    What falls outside is permuted again, until it falls inside.
    """

    def __init__(self, size: int, key: Sequence[int | str]) -> None:
        """Derives the permutation from `key`; `size` is at least 1."""
        self._size = np.uint64(size)
        half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
        self._shift, self._mask = np.uint64(half_bits), np.uint64(2**half_bits - 1)
        digest = blake2b(repr(tuple(key)).encode(), digest_size=8 * ROUNDS).digest()
        self._round_keys = np.frombuffer(digest, "<u8")

    def __call__(self, places: Places) -> Places:
        """Where each of these places, all below `size`, goes."""
        permuted = self._permuted(places)
        while (outside := permuted >= self._size).any():
            permuted[outside] = self._permuted(permuted[outside])
        return permuted

    def _permuted(self, places: Places) -> Places:
        left, right = places >> self._shift, places & self._mask
        for key in self._round_keys:
            left, right = right, left ^ (_splitmix64(right + key) & self._mask)
        return (left << self._shift) | right


def _splitmix64(values: Places) -> Places:
    """The finalizer of splitmix64, by which each bit depends on all bits."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


REVISION_BYTES = 8
ROWS_AT_ONCE = 64
"""Rows that are read together, and bound of the rows that a page bounded in bytes reads in excess."""


@dataclass(frozen=True, slots=True)
class Split:
    """A part of the rows of a file or data set."""

    source: str
    """The split that the files or the data set call so; another one if this one was held out of it."""
    rows: Rows
    size: int
    first: int = 0
    """Its beginning among the rows, in the order of `held_out`."""
    held_out: Permutation | None = None
    """The order of the rows of which some are held out."""

    def numbers(self, places: Places) -> list[int]:
        """The numbers of the rows at these places of the split."""
        chosen = places + np.uint64(self.first)
        return cast(list[int], (chosen if self.held_out is None else self.held_out(chosen)).tolist())


class TaskData:
    """The data of one task, ready to be read."""

    def __init__(
        self, task_name: str, splits: Mapping[str, Split], columns: SampleColumns, shuffle_seed: int | None
    ) -> None:
        self.splits = splits
        self._task_name = task_name
        self.columns = columns
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
            DataRefused: there is no such split, or a row is not a sample.
        """
        chosen = self._split(split)
        seed = self._shuffle_seed if shuffle_seed is None else shuffle_seed
        for begin in range(start, start + count, ROWS_AT_ONCE):
            places = np.arange(begin, min(begin + ROWS_AT_ONCE, start + count), dtype=np.uint64)
            numbers = chosen.numbers(_shuffled(places, chosen.size, seed))
            for number, sample in zip(numbers, self.read(chosen, numbers), strict=True):
                try:
                    yield to_json(sample)
                except ValueError as error:
                    place = chosen.rows.place_of(number)
                    raise DataRefused(f"{place} has a value that JSON does not have: {error}") from error

    def revision(self, split: str | None, shuffle_seed: int | None) -> str:
        """Digest of the rows, their order in a split, and their columns. Equal revisions give equal samples.

        Takes a second for a gigabyte of JSON lines, the first time. Arguments and failures are those of `samples`.
        """
        chosen = self._split(split)
        seed = self._shuffle_seed if shuffle_seed is None else shuffle_seed
        order = (chosen.source, chosen.size, chosen.first, chosen.held_out is not None, seed)
        parts = (chosen.rows.digest, self.columns.fingerprint, repr(order).encode())
        return blake2b(b"\0".join(parts), digest_size=REVISION_BYTES).hexdigest()

    def read(self, split: Split, numbers: list[int]) -> Iterator[dict[str, Any]]:
        """The samples of these rows. Raises `DataRefused`."""
        for number, row in zip(numbers, split.rows.read(numbers), strict=True):
            try:
                sample = self.columns.sample(row)
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


def _shuffled(places: Places, size: int, seed: int | None) -> Places:
    """Places of a split, from places that count through all its epochs."""
    epochs, within = np.divmod(places, np.uint64(size))
    if seed is None:
        return within
    for epoch in np.unique(epochs).tolist():
        chosen = epochs == epoch
        within[chosen] = Permutation(size, (seed, epoch))(within[chosen])
    return within
