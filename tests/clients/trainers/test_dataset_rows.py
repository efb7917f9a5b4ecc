"""Rows of a dataset as the fields of samples."""

import json

import numpy as np
import pytest

from rollout_client.trainers.dataset_rows import RowReader, fields_by_prompt
from tests.clients.trainers.scripted_trainer import PROMPTS


def test_a_row_becomes_what_a_sample_has_beside_its_prompt() -> None:
    row = {
        "prompt": "x",
        "task_name": "a",
        "extra_env_info": '{"n": 1}',
        "tools": None,
        "stop_strings": ["."],
        "level": 3,
    }
    assert RowReader("b").fields(row) == {"task_name": "a", "extra_env_info": {"n": 1}, "stop_strings": ["."]}
    assert RowReader("b", ["level"]).fields({"prompt": "x", "level": 3}) == {
        "task_name": "b",
        "extra_env_info": {"level": 3},
    }


def test_a_row_that_says_too_little_is_refused() -> None:
    with pytest.raises(ValueError, match="has no column task_name"):
        RowReader().fields({"prompt": "x"})
    with pytest.raises(ValueError, match="has no column level; it has prompt, n"):
        RowReader("a", ["level"]).fields({"prompt": "x", "n": 1})


def test_prompts_are_equal_whatever_null_fields_a_dataset_filled_in() -> None:
    filled = [{**PROMPTS[0][0], "name": None}]
    found = fields_by_prompt([{"prompt": filled, "extra_env_info": {}}, {"prompt": PROMPTS[0]}], RowReader("a"))
    assert list(found) == [json.dumps(PROMPTS[0], sort_keys=True)]


def test_rows_of_numpy_arrays_are_read_as_lists_and_numbers() -> None:
    row = {"prompt": PROMPTS[0], "extra_env_info": {"grid": np.eye(2, dtype=int), "n": np.int64(3)}}
    [fields] = fields_by_prompt([row, row], RowReader("a")).values()
    assert fields == {"task_name": "a", "extra_env_info": {"grid": [[1, 0], [0, 1]], "n": 3}}
