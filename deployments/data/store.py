"""The deployment that opens, checks and holds the data sets of the tasks, if there are any.

`RemoteData` (`service/remote/environment.py`) is the caller. Data are held here, and neither in the ingress replicas,
whose event loops must not stall, nor by the environments, of which there may be many. What is held is an index: the
rows stay in files that are mapped into memory, so that replicas on one node share the pages that the system has read.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError

from deployments import logs
from deployments.data.rows import DataNotLoadable, DataRefused, DatasetRows, JsonLines, Row, Rows, within_bytes
from deployments.data.settings import DataSettings, HubSettings
from deployments.data.task_data import MISSING, Permutation, SampleColumns, Split, TaskData, get_path
from rollout_client.contract.rollouts import SampleInput

if TYPE_CHECKING:
    from datasets import Dataset

CHECKED_ROWS = 1000
"""Rows of each split that are checked at the start, spread over the split. All are checked when they are played."""
MOST_NAMED = 20


def load_task_data(
    task_name: str, settings: DataSettings, extra_env_info: type[BaseModel] | None = None, has_start: bool = True
) -> TaskData:
    """Opens the data and checks some of its rows.

    Args:
        extra_env_info: the model of the environment, which the rows must match too; None if it is not known.
        has_start: whether the environment may make the first messages, so that rows need no prompt.

    Raises:
        DataNotLoadable: it cannot be read, or rows are not samples of the task.
    """
    sources = dict(_opened_sources(settings))
    if empty := [name for name, rows in sources.items() if not len(rows)]:
        raise DataNotLoadable(f"{'files' if settings.hub is None else 'hub'}: split {empty[0]} has no rows.")
    data = TaskData(task_name, _splits_of(sources, settings), SampleColumns(settings), settings.shuffle_seed)
    for split in data.splits.values():
        _check_rows(data, split, partial(_first_problem, extra_env_info=extra_env_info, has_start=has_start))
    return data


def _opened_sources(settings: DataSettings) -> Iterator[tuple[str, Rows]]:
    """The rows of each split that the files or the data set have."""
    if settings.hub is not None:
        for name, dataset in _hub_splits(settings.hub).items():
            yield name, DatasetRows(dataset, f"{settings.hub.name} {name}")
        return
    for name, patterns in settings.files_by_split.items():
        yield name, _rows_of_files([path for pattern in patterns for path in _found_files(pattern)])


def _found_files(pattern: str) -> list[Path]:
    path = Path(pattern).expanduser().absolute()
    if found := sorted(Path(path.anchor).glob(str(path.relative_to(path.anchor)))):
        return found
    raise DataNotLoadable(f"files: there is no {pattern} on this machine.")


def _rows_of_files(paths: list[Path]) -> Rows:
    try:
        if all(path.suffix == ".jsonl" for path in paths):
            return JsonLines(paths)
        if all(path.suffix == ".parquet" for path in paths):
            return DatasetRows(_parquet_dataset(paths), str(paths[0]))
    except OSError as error:
        raise DataNotLoadable(f"files: {error.filename or paths[0]} cannot be read: {error}.") from error
    names = ", ".join(map(str, paths[:MOST_NAMED]))
    raise DataNotLoadable(f"files: those of a split must all end in .jsonl, or all in .parquet: {names}.")


def _parquet_dataset(paths: list[Path]) -> "Dataset":
    """The library converts the files to an Arrow file in its cache, once, and maps that into memory."""
    from datasets import load_dataset
    from datasets.exceptions import DatasetGenerationError

    try:
        return load_dataset("parquet", data_files=list(map(str, paths)), split="train")
    except (DatasetGenerationError, ValueError) as error:
        reason = error.__cause__ or error
        raise DataNotLoadable(f"files: {paths[0]} cannot be read as Parquet: {reason}.") from error


def _hub_splits(hub: HubSettings) -> "Mapping[str, Dataset]":
    from datasets import DatasetDict, load_dataset

    # The library raises what its data sets, the Hub and the network raise.
    try:
        splits = load_dataset(hub.name, hub.config, revision=hub.revision)
    except Exception as error:
        raise DataNotLoadable(f"hub: {hub.name} cannot be loaded: {type(error).__name__}: {error}.") from error
    assert isinstance(splits, DatasetDict)
    return dict(splits)


def _splits_of(sources: Mapping[str, Rows], settings: DataSettings) -> dict[str, Split]:
    splits = {name: Split(name, rows, len(rows)) for name, rows in sources.items()}
    if not settings.held_out:
        return splits
    first, rows = next(iter(sources.items()))
    if taken := settings.held_out.keys() & sources.keys():
        raise DataNotLoadable(f"held_out.{min(taken)}: the data have a split of this name; choose another one.")
    sizes = {
        name: share if isinstance(share, int) else max(1, round(share * len(rows)))
        for name, share in settings.held_out.items()
    }
    left = len(rows) - sum(sizes.values())
    if left < 1:
        raise DataNotLoadable(
            f"held_out: {sum(sizes.values())} of the {len(rows)} rows of split {first} leave none to train on."
        )
    order = Permutation(len(rows), ("held out", 0))
    begin = 0
    for name, size in ({first: left} | sizes).items():
        splits[name] = Split(first, rows, size, begin, order)
        begin += size
    return splits


def _check_rows(data: TaskData, split: Split, problem_of: Callable[[Row], str | None]) -> None:
    """Raises `DataNotLoadable` with the first problem of up to `CHECKED_ROWS` rows of the split."""
    numbers = sorted({*range(0, split.size, max(1, -(-split.size // CHECKED_ROWS))), split.size - 1})
    try:
        _check_columns(data.columns, split.rows.read(numbers))
        for number, sample in zip(numbers, data.read(split, numbers), strict=True):
            if problem := problem_of(sample):
                raise DataNotLoadable(f"{split.rows.place_of(number)}: {problem}.")
    except DataRefused as error:
        raise DataNotLoadable(f"{error}.") from error


def _check_columns(columns: SampleColumns, rows: Sequence[dict[str, Any]]) -> None:
    """Raises `DataNotLoadable` if a column is named that no row has."""
    for target, column in columns.named:
        if all(get_path(row, column) is MISSING for row in rows):
            there = ", ".join(islice(dict.fromkeys(name for row in rows for name in row), MOST_NAMED))
            raise DataNotLoadable(f"columns.{target}: there is no column {column!r}; the rows have {there}.")


def _first_problem(sample: Row, extra_env_info: type[BaseModel] | None, has_start: bool) -> str | None:
    """The first problem of a sample; None if it is valid."""
    try:
        SampleInput.model_validate(sample, strict=True)
        if not has_start and not (sample.get("messages") or sample.get("message_log")):
            return "it has no messages: name their column under columns.messages"
    except ValidationError as error:
        return _described(error, ())
    try:
        if extra_env_info is not None:
            extra_env_info.model_validate(sample.get("extra_env_info", {}))
    except ValidationError as error:
        return _described(error, ("extra_env_info",))
    return None


def _described(error: ValidationError, before: tuple[str, ...]) -> str:
    problem = error.errors(include_url=False)[0]
    field = ".".join(map(str, (*before, *problem["loc"])))
    given = "" if isinstance(problem["input"], dict | list) else f" (given: {problem['input']!r:.80})"
    return f"{field}: {problem['msg'].removeprefix('Value error, ')}{given}"


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
            DataRefused: there is no such split, or a row is not a sample.
        """
        lines = within_bytes(self._data[task_name].samples(split, start, count, shuffle_seed), most_bytes)
        messages = _in_messages(lines)
        while message := await asyncio.to_thread(next, messages, b""):
            yield message


def _in_messages(lines: Iterator[bytes]) -> Iterator[bytes]:
    """The lines in parts of `BYTES_PER_MESSAGE`, of which the last one is shorter."""
    part = bytearray()
    for line in lines:
        part += line + b"\n"
        while len(part) >= BYTES_PER_MESSAGE:
            yield bytes(part[:BYTES_PER_MESSAGE])
            del part[:BYTES_PER_MESSAGE]
    if part:
        yield bytes(part)
