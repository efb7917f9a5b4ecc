"""The samples of a data set: splits, epochs, the shuffle, and what becomes of a row."""

import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, ValidationError

from deployments.data import store
from deployments.data.rows import DataNotLoadable, DataRefused, JsonLines, within_bytes
from deployments.data.settings import DataSettings
from deployments.data.store import load_task_data
from deployments.data.task_data import Permutation, TaskData

EMPTY = Path("/dev/null")


class GroundTruth(BaseModel):
    model_config = ConfigDict(extra="forbid")

    ground_truth: int


@pytest.fixture
def data_of(tmp_path: Path) -> Callable[..., TaskData]:
    """Loads rows, or lines of text, from a file, with further settings."""

    def load(rows: Sequence[Any], **settings: Any) -> TaskData:
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        (tmp_path / "rows.jsonl").write_text("\n".join(lines))
        given = {"files": str(tmp_path / "*.jsonl"), **settings}
        return load_task_data("sums", DataSettings.model_validate(given), GroundTruth, has_start=False)

    return load


def sums(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"{number} + 1?", "extra_env_info": {"ground_truth": number + 1}} for number in range(count)]


def samples(
    data: TaskData, start: int, count: int, split: str | None = None, shuffle_seed: int | None = None
) -> list[dict[str, Any]]:
    return [json.loads(sample) for sample in data.samples(split, start, count, shuffle_seed)]


def ids(*asked: Any, **shuffle: Any) -> list[int]:
    return [int(sample["id"].rpartition("/")[2]) for sample in samples(*asked, **shuffle)]


def test_equal_data_have_equal_revisions_wherever_they_are(data_of: Callable[..., TaskData], tmp_path: Path) -> None:
    first = data_of(sums(9), held_out={"test": 3}, shuffle_seed=5)
    revisions = [first.revision(*asked) for asked in ((None, None), ("train", 5), ("test", None), (None, 6))]
    assert len(set(revisions)) == 3, "the first two are the same split with the same seed"
    (tmp_path / "other").mkdir()
    elsewhere = tmp_path / "other" / "rows.jsonl"
    elsewhere.write_bytes((tmp_path / "rows.jsonl").read_bytes())
    os.utime(elsewhere, (0, 0))
    moved = data_of(sums(9), files=str(elsewhere), held_out={"test": 3}, shuffle_seed=5)
    assert [moved.revision(*asked) for asked in ((None, None), ("train", 5), ("test", None), (None, 6))] == revisions


@pytest.mark.parametrize(
    ("rows", "settings"),
    [
        (sums(10), {}),
        (sums(8), {}),
        (sums(9)[::-1], {}),
        ([*sums(8), {"prompt": "other", "extra_env_info": {"ground_truth": 1}}], {}),
        (sums(9), {"shuffle_seed": 6}),
        (sums(9), {"held_out": {"test": 2}}),
        (sums(9), {"system_prompt": "Add."}),
        (sums(9), {"prompt_template": "Add: {prompt}"}),
    ],
)
def test_what_can_give_a_place_another_sample_changes_the_revision(
    data_of: Callable[..., TaskData], rows: list[dict[str, Any]], settings: dict[str, Any]
) -> None:
    given = {"held_out": {"test": 3}, "shuffle_seed": 5}
    before = data_of(sums(9), **given).revision(None, None)
    assert data_of(rows, **{**given, **settings}).revision(None, None) != before


def test_a_row_becomes_a_sample_of_the_task_that_is_named_after_its_row(data_of: Callable[..., TaskData]) -> None:
    [made] = samples(data_of(sums(3)), 1, 1)
    asked = {"messages": [{"role": "user", "content": "1 + 1?"}], "extra_env_info": {"ground_truth": 2}}
    assert made == {"id": "train/1", "task_name": "sums", **asked}


def test_columns_become_the_fields_that_the_config_names(data_of: Callable[..., TaskData]) -> None:
    row = {
        "question": "17 + 25?",
        "solution": "Seventeen and 25 make 42.\n#### 42",
        "reward_model": {"style": "rule"},
        "uuid": "q7",
        "tools": '[{"type": "function"}]',
        "ignored": 1,
    }
    columns = {
        "messages": "question",
        "id": "uuid",
        "extra_env_info.ground_truth": {"column": "solution", "pattern": "#### (.*)", "parse_json": True},
        "style": "reward_model.style",
        "tools": {"column": "tools", "parse_json": True},
    }
    data = data_of([row], columns=columns, system_prompt="Add.", prompt_template="Sum: {prompt} Use \\boxed{}.")
    assert samples(data, 0, 1) == [
        {
            "id": "q7",
            "task_name": "sums",
            "messages": [
                {"role": "system", "content": "Add."},
                {"role": "user", "content": "Sum: 17 + 25? Use \\boxed{}."},
            ],
            "extra_env_info": {"ground_truth": 42},
            "style": "rule",
            "tools": [{"type": "function"}],
        }
    ]


def test_places_count_on_through_epochs_which_have_each_row_once(data_of: Callable[..., TaskData]) -> None:
    data = data_of(sums(10))
    assert ids(data, 8, 4) == [8, 9, 0, 1]
    epochs = [ids(data, start, 10, shuffle_seed=3) for start in (0, 10, 20)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(10))] * 3
    assert epochs[0] != epochs[1] != epochs[2]
    assert ids(data, 5, 20, shuffle_seed=3) == [*epochs[0][5:], *epochs[1], *epochs[2][:5]]


def test_the_shuffle_of_a_request_takes_the_place_of_that_of_the_config(data_of: Callable[..., TaskData]) -> None:
    data = data_of(sums(100), shuffle_seed=3)
    assert ids(data, 0, 100) == ids(data, 0, 100, shuffle_seed=3) != ids(data, 0, 100, shuffle_seed=4)


def test_held_out_rows_are_in_no_other_split_whatever_the_shuffle(data_of: Callable[..., TaskData]) -> None:
    data = data_of(sums(100), held_out={"validation": 0.1, "test": 5})
    assert data.sizes == {"train": 85, "validation": 10, "test": 5}
    parts = [ids(data, 0, size, split, shuffle_seed=9) for split, size in data.sizes.items()]
    assert sorted(number for part in parts for number in part) == list(range(100))
    assert sorted(parts[1]) == sorted(ids(data, 0, 10, "validation"))
    assert sorted(parts[1]) != list(range(85, 95)), "they are spread over the rows"


def test_a_page_ends_before_the_bytes_that_it_may_take_but_has_one_sample() -> None:
    assert list(within_bytes([b"aaa", b"bbb", b"ccc"], 8)) == [b"aaa", b"bbb"]
    assert list(within_bytes([b"aaaaaaaaa", b"b"], 8)) == [b"aaaaaaaaa"]


def test_a_wrong_row_is_named_when_asked_for(data_of: Callable[..., TaskData], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "CHECKED_ROWS", 1)
    data = data_of(["", *map(json.dumps, sums(3)), "{", json.dumps(sums(1)[0])])
    assert len(samples(data, 0, 3)) == 3
    with pytest.raises(DataRefused, match=r"rows\.jsonl line 5 is not JSON: EOF while parsing"):
        samples(data, 3, 1)


def test_an_unknown_split_is_refused_with_the_known_ones(data_of: Callable[..., TaskData]) -> None:
    data = data_of(sums(3), held_out={"test": 1})
    for asked in (lambda: samples(data, 0, 1, "eval"), lambda: data.revision("eval", None)):
        with pytest.raises(DataRefused, match="task 'sums' has no split 'eval'; it has train, test") as refused:
            asked()
        assert (refused.value.field, refused.value.value) == ("split", "eval")


NO_INTEGER = "unable to parse string as an integer (given: 'x')"
NO_COLUMN = "columns.messages: there is no column 'question'; the rows have prompt, extra_env_info."


def in_line_2(row: Any, says: str) -> tuple[list[Any], dict[str, Any], str]:
    return [*sums(1), row], {}, says


def of_column(says: str, **column: Any) -> tuple[list[Any], dict[str, Any], str]:
    return sums(3), {"columns": {"messages": {"column": "prompt", **column}}}, f"rows.jsonl line 1: {says}"


@pytest.mark.parametrize(
    ("rows", "settings", "says"),
    [
        in_line_2({"extra_env_info": {"ground_truth": 3}}, "line 2: it has no messages: name their column under col"),
        in_line_2({"prompt": "2?"}, "rows.jsonl line 2: extra_env_info.ground_truth: Field required"),
        in_line_2({"prompt": "2?", "extra_env_info": {"ground_truth": "x"}}, NO_INTEGER),
        in_line_2({"prompt": 2}, "rows.jsonl line 2: messages: Input should be a valid list (given: 2)"),
        in_line_2("[1]", "rows.jsonl line 2 is not a JSON object."),
        in_line_2("{", "rows.jsonl line 2 is not JSON"),
        (["", ""], {}, "files: split train has no rows."),
        ([], {"files": "/no/where.jsonl"}, "files: there is no /no/where.jsonl on this machine."),
        ([], {"files": __file__}, f"must all end in .jsonl, or all in .parquet: {__file__}."),
        (sums(3), {"columns": {"messages": "question"}}, NO_COLUMN),
        of_column("the pattern '#' is not found in column 'prompt'.", pattern="#"),
        of_column("column 'prompt' is not JSON: ", pattern=r"\?(!)?", parse_json=True),
        (sums(3), {"held_out": {"test": 3}}, "held_out: 3 of the 3 rows of split train leave none to train on."),
        (sums(3), {"held_out": {"train": 1}}, "held_out.train: the data have a split of this name; choose another"),
    ],
)
def test_rows_and_settings_that_do_not_fit_are_refused_with_a_sentence(
    data_of: Callable[..., TaskData], rows: list[Any], settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(DataNotLoadable, match=re.escape(says)):
        data_of(rows, **settings)


def test_a_field_is_not_both_a_column_and_made_of_columns() -> None:
    columns = {"extra_env_info.ground_truth": "answer", "extra_env_info": "info"}
    with pytest.raises(ValidationError, match=r"columns\.extra_env_info is the whole of it"):
        DataSettings.model_validate({"files": "rows.jsonl", "columns": columns})


@given(
    st.lists(
        st.lists(st.sampled_from(["", "\r", '{"n": 1}', '{"n": 2}\r', ' {"n": "\u2028\x85"}']), max_size=6), max_size=3
    ),
    st.sampled_from(["utf-8", "utf-8-sig"]),
)
def test_the_rows_are_the_lines_that_are_not_empty_without_a_mark(files: list[list[str]], encoding: str) -> None:
    with TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{number}.jsonl" for number in range(len(files))]
        for path, lines in zip(paths, files, strict=True):
            path.write_bytes("\n".join(lines).encode(encoding))
        rows = JsonLines([*paths, EMPTY])
        expected = [
            (f"{path} line {number}", json.loads(line))
            for path, lines in zip(paths, files, strict=True)
            for number, line in enumerate(lines, 1)
            if line.strip()
        ]
        places = [rows.place_of(number) for number in range(len(rows))]
        assert [*zip(places, rows.read(range(len(rows))), strict=True)] == expected


def permuted(size: int, *key: int | str) -> list[int]:
    places: list[int] = Permutation(size, key)(np.arange(size, dtype=np.uint64)).tolist()
    return places


@given(st.integers(1, 3000), st.integers(0, 2**63), st.integers(0, 100))
def test_every_place_goes_to_one_place(size: int, seed: int, epoch: int) -> None:
    assert sorted(permuted(size, seed, epoch)) == list(range(size))


def test_the_shuffle_of_a_key_never_changes() -> None:
    assert permuted(10, 0, 0) == [8, 7, 2, 3, 1, 9, 5, 4, 0, 6]
    assert permuted(10, 0, 1) == [0, 4, 8, 7, 9, 2, 1, 6, 3, 5]
