"""Samples of files and data sets, with columns made to fields."""

import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollout_client.cli.run.inputs import read_samples
from rollout_client.cli.run.plan import with_seeds
from tests.clients.scripted_service import Json

ROWS: list[Json] = [
    {"question": "1 + 1?", "answer": {"final": "2"}, "level": None},
    {"question": "2 + 2?", "answer": {"final": "4"}, "level": "hard"},
]
MAP = ["messages=question", "extra_env_info.ground_truth=answer.final"]
SAMPLES: list[Json] = [
    {"messages": [{"role": "user", "content": "1 + 1?"}], "extra_env_info": {"ground_truth": "2"}, "task_name": "math"},
    {"messages": [{"role": "user", "content": "2 + 2?"}], "extra_env_info": {"ground_truth": "4"}, "task_name": "math"},
]


def test_lines_are_read_with_a_byte_order_mark_and_any_character(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    sample = {**SAMPLES[0], "messages": [{"role": "user", "content": "1\u2028+\x851 \ufeff?"}]}
    line = json.dumps(sample, ensure_ascii=False)
    path.write_text(f"{line}\r\n\r\n{line}", encoding="utf-8-sig", newline="")
    assert read_samples(str(path)) == [sample, sample]


def test_columns_of_a_parquet_file_become_fields(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS), path)
    assert read_samples(str(path), MAP, "math") == SAMPLES


@pytest.mark.slow
def test_columns_of_a_saved_data_set_become_fields(tmp_path: Path) -> None:
    data = datasets.Dataset.from_list(ROWS)
    data.save_to_disk(tmp_path / "one")
    datasets.DatasetDict(test=data).save_to_disk(tmp_path / "split")
    assert read_samples(str(tmp_path / "one"), MAP, "math") == SAMPLES
    assert read_samples(str(tmp_path / "split"), MAP, "math", "test") == SAMPLES


def test_a_data_set_of_the_hub_is_asked_for_by_name_and_split(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(name: str, split: str) -> datasets.Dataset:
        asked.append((name, split))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert read_samples("hf:org/sums", MAP, "math", "test") == SAMPLES
    assert asked == [("org/sums", "test")]


def test_without_a_map_columns_are_fields_and_nulls_are_absent(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    rows = [{"prompt": "Go.", "task_name": "a", "x": None}, {"prompt": "Stop.", "task_name": "b", "x": 1}]
    pq.write_table(pa.Table.from_pylist(rows), path)
    assert read_samples(str(path)) == [
        {"messages": [{"role": "user", "content": "Go."}], "task_name": "a"},
        {"messages": [{"role": "user", "content": "Stop."}], "task_name": "b", "x": 1},
    ]


@pytest.mark.parametrize(
    ("line", "options", "sentence"),
    [
        ('{"a": 1}', {"columns": ["messages=b"]}, "row 0 has no column b; it has a."),
        ('{"a": 1}', {"columns": ["messages"]}, "--map messages: write FIELD=COLUMN, such as messages=question."),
        (
            '{"a": "x"}',
            {"columns": ["messages=a", "messages.content=a"]},
            "row 0: messages.content cannot lie in messages, which another --map gives as a whole.",
        ),
        ('{"a": "\xe9"}', {}, "byte 0xe9 in position 7: invalid continuation byte."),
        ('{"messages": "Go."}', {}, "row 0 has no task_name: name one with --task."),
        ('{"input_row": 1}', {}, "row 0 has a field input_row, which the results have: rename it."),
    ],
)
def test_a_row_of_no_sample_is_one_sentence(tmp_path: Path, line: str, options: dict[str, Any], sentence: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(line.encode("latin-1"))
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - the sentence is compared
        read_samples(str(path), **options)
    assert str(raised.value).endswith(sentence)


def test_the_seed_of_a_row_does_not_depend_on_the_others() -> None:
    both = with_seeds([{"task_name": "a"}, {"task_name": "a"}], {"sampling": {"seed": 7}})
    assert [sample["idx"] for sample in both] == [0, 1]
    assert both[0]["seed"] != both[1]["seed"]
    assert with_seeds([{"task_name": "a"}], {"sampling": {"seed": 7}}) == both[:1]
    assert with_seeds([{"seed": 3, "idx": 9}], {"sampling": {"seed": 7}}) == [{"seed": 3, "idx": 9}]
    assert with_seeds([{}], {"sampling": {}}) == [{"idx": 0}]
