"""The samples of a run: JSON lines, a Parquet file, or a data set of Hugging Face, with columns made to fields."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rollout_client.calls.sync_client.client import RolloutClient
from rollout_client.cli.run.plan import INPUT_ROW
from rollout_client.contract.rollouts import SampleInput
from rollout_client.errors import needed_for
from rollout_client.json_lines import numbered_lines, without_nulls

HUB = "hf:"
"""Prefix of the name of a data set of the Hugging Face Hub."""

DEFAULT_COUNT = 64
"""Samples of a task that does not say how many it has."""

Row = dict[str, Any]


def read_samples(source: str, columns: Sequence[str] = (), task: str | None = None, split: str = "train") -> list[Row]:
    """Reads the samples of `source`, whose columns become fields.

    Args:
        source: a file that ends in `.parquet`, a file of JSON lines, `hf:NAME`, or a folder of `save_to_disk`.
        columns: `FIELD=COLUMN` each. Without them the columns are the fields, and `prompt` is another name of
            `messages`. A field may lie in another one, as in `extra_env_info.ground_truth`, and so may a column.
        task: the task of rows that name none.
        split: of a data set.

    Raises:
        ValueError: no samples, or the line or row that is none; the message says what is wrong.
        OSError: the file cannot be read.
        ModuleNotFoundError: without the extra `arrow` or `datasets`.
    """
    mapping = dict[str, str]()
    for text in columns:
        field, _, mapping[field] = text.partition("=")
        if not (field and mapping[field]):
            raise ValueError(f"--map {text}: write FIELD=COLUMN, such as messages=question.")
    rows = _rows_of(source, split)
    samples = [_sample_of(row, mapping, task, f"{source} row {place}") for place, row in enumerate(rows)]
    if not samples:
        raise ValueError(f"{source} holds no samples.")
    return samples


def samples_of(
    client: RolloutClient, tasks: list[str], source: str | None, count: int | None, seed: int | None, split: str | None
) -> list[Row]:
    """The samples of a file or data set, or else `count` of each task of the service.

    Without a count they are all samples of a task that says how many it has, or else `DEFAULT_COUNT`.
    """
    if bool(tasks) == (source is not None):
        raise ValueError("Name tasks of the service, or samples with --samples: one of both.")
    if source is not None:
        return read_samples(source, split=split or "train")
    return [
        sample.model_dump(mode="json", exclude_unset=True)
        for task in tasks
        for sample in _samples_of_task(client, task, count, seed, split)
    ]


def _samples_of_task(
    client: RolloutClient, task: str, count: int | None, seed: int | None, split: str | None
) -> list[SampleInput]:
    start, samples = 0, list[SampleInput]()
    while len(samples) < (count or DEFAULT_COUNT):
        page = client.task_samples(task, (count or DEFAULT_COUNT) - len(samples), start, seed=seed, split=split)
        if count is None and page.sample_count is not None:
            # All at once: an environment makes other samples from another start.
            count = page.sample_count
        elif page.samples:
            samples += page.samples
            start = page.next_start
        else:
            raise ValueError(f"The service gave no sample of task {task} from place {start} on.")
    return samples


def _rows_of(source: str, split: str) -> Iterable[Row]:
    path = Path(source)
    if source.startswith(HUB) or path.is_dir():
        return map(without_nulls, _data_set(source, split))
    if path.suffix == ".parquet":
        with needed_for("Parquet", "arrow"):
            from pyarrow.parquet import read_table
        return map(without_nulls, read_table(path).to_pylist())
    return _json_lines(path)


def _data_set(source: str, split: str) -> Iterable[Row]:
    with needed_for("A data set", "datasets"):
        import datasets
    if source.startswith(HUB):
        return datasets.load_dataset(source.removeprefix(HUB), split=split)  # type: ignore[no-any-return]
    loaded = datasets.load_from_disk(source)
    return loaded[split] if isinstance(loaded, datasets.DatasetDict) else loaded  # type: ignore[no-any-return]


def _json_lines(path: Path) -> Iterable[Row]:
    with path.open("rb") as lines:
        for line_number, line in numbered_lines(lines):
            try:
                value = json.loads(line.decode())
            except ValueError as error:
                raise ValueError(f"{path} line {line_number} is not JSON: {error}.") from error
            if not isinstance(value, dict):
                raise ValueError(
                    f"{path} line {line_number} is not a JSON object: a sample looks like `rollout tasks` shows it."
                )
            yield value


def _sample_of(row: Row, mapping: Mapping[str, str], task: str | None, place: str) -> Row:
    if INPUT_ROW in row:
        raise ValueError(f"{place} has a field {INPUT_ROW}, which the results have: rename it.")
    sample = _mapped(row, mapping, place) if mapping else dict(row)
    if not mapping and "prompt" in row and not row.keys() & {"messages", "message_log"}:
        sample["messages"] = sample.pop("prompt")
    messages = sample.get("messages")
    if isinstance(messages, str):
        sample["messages"] = [{"role": "user", "content": messages}]
    if task is not None:
        sample.setdefault("task_name", task)
    if "task_name" not in sample:
        raise ValueError(f"{place} has no task_name: name one with --task.")
    return sample


def _mapped(row: Row, mapping: Mapping[str, str], place: str) -> Row:
    sample: Row = {}
    for field, column in mapping.items():
        *outer, last = field.split(".")
        holder = sample
        for name in outer:
            holder = holder.setdefault(name, {})
            if not isinstance(holder, dict):
                raise ValueError(f"{place}: {field} cannot lie in {name}, which another --map gives as a whole.")
        value: Any = row
        for name in column.split("."):
            if not isinstance(value, dict) or name not in value:
                raise ValueError(f"{place} has no column {column}; it has {', '.join(row)}.")
            value = value[name]
        holder[last] = value
    return sample
