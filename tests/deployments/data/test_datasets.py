"""Parquet files and data sets of the Hub, which the library `datasets` reads. It takes seconds to import."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from deployments.data.rows import DataNotLoadable
from deployments.data.settings import DataSettings
from deployments.data.store import load_task_data

pytestmark = pytest.mark.slow
ROWS = [
    {"prompt": [{"role": "user", "content": "a"}], "extra_env_info": {"ground_truth": "1", "style": None}},
    {"prompt": [{"role": "user", "content": "b"}], "extra_env_info": {"ground_truth": "2", "style": "rule"}},
    {"prompt": [{"role": "user", "content": "c"}], "extra_env_info": {"ground_truth": "3", "style": None}},
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def written(path: Path, rows: list[dict[str, Any]]) -> None:
    pq.write_table(pa.Table.from_pylist(rows), path)


def samples(settings: dict[str, Any], split: str, count: int) -> list[dict[str, Any]]:
    data = load_task_data("t", DataSettings.model_validate(settings))
    return [json.loads(sample) for sample in data.samples(split, 0, count, None)]


def test_parquet_files_have_a_revision_by_their_rows(tmp_path: Path) -> None:
    def revision_of(name: str, rows: list[dict[str, Any]]) -> str:
        written(tmp_path / name, rows)
        return load_task_data("t", DataSettings(files=str(tmp_path / name))).revision(None, None)

    first = revision_of("a.parquet", ROWS)
    assert revision_of("b.parquet", ROWS) == first
    assert first not in (revision_of("c.parquet", ROWS[::-1]), revision_of("d.parquet", ROWS[:2]))


def test_rows_of_parquet_files_are_samples_without_their_nulls(tmp_path: Path) -> None:
    written(tmp_path / "1.parquet", ROWS[:2])
    written(tmp_path / "2.parquet", ROWS[2:])
    made = samples({"files": str(tmp_path / "*.parquet")}, "train", 3)
    assert [sample["extra_env_info"] for sample in made] == [
        {"ground_truth": "1"},
        {"ground_truth": "2", "style": "rule"},
        {"ground_truth": "3"},
    ]
    assert made[2]["messages"] == [{"role": "user", "content": "c"}]


def test_a_data_set_has_its_own_splits(tmp_path: Path) -> None:
    written(tmp_path / "train.parquet", ROWS[:2])
    written(tmp_path / "test.parquet", ROWS[2:])
    assert [sample["id"] for sample in samples({"hub": {"name": str(tmp_path)}}, "test", 1)] == ["test/0"]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"files": "{}/bad.parquet"}, r"files: \S*bad\.parquet cannot be read as Parquet: "),
        ({"hub": {"name": "/no/where"}}, r"^hub: /no/where cannot be loaded: "),
    ],
)
def test_what_cannot_be_loaded_is_named(tmp_path: Path, settings: dict[str, Any], says: str) -> None:
    (tmp_path / "bad.parquet").write_bytes(b"no")
    given = {name: value.format(tmp_path) if name == "files" else value for name, value in settings.items()}
    with pytest.raises(DataNotLoadable, match=says):
        load_task_data("t", DataSettings.model_validate(given))
