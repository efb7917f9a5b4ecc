"""Rows as Arrow columns and back: nothing is lost, whatever a row has, lacks or holds as null."""

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict

from rollout_client.arrow.rows import record_batch, rows_of
from rollout_client.arrow.schema import FURTHER_FIELDS, json_text
from tests.clients.data_out.responses import json_values, texts

PART = pa.struct([("name", pa.string()), ("count", pa.int32()), FURTHER_FIELDS])
SCHEMA = pa.schema(
    [
        ("text", pa.string()),
        ("number", pa.int64()),
        ("share", pa.float64()),
        ("counts", pa.list_(pa.int32())),
        ("weights", pa.map_(pa.string(), pa.float64())),
        json_text("info"),
        ("part", PART),
        ("parts", pa.list_(PART)),
        FURTHER_FIELDS,
    ]
)


def dicts(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Each of `fields` may be absent or null, and a field without a column may be there."""
    optional = {name: st.none() | values for name, values in fields.items()}
    return st.fixed_dictionaries({}, optional={**optional, "beyond": json_values})


parts = dicts(name=texts, count=st.integers(-(2**31), 2**31 - 1))
rows = dicts(
    text=texts,
    number=st.integers(-(2**63), 2**63 - 1),
    share=st.floats(allow_nan=False),
    counts=st.lists(st.integers(0, 9), max_size=3),
    weights=st.dictionaries(texts, st.floats(allow_nan=False), max_size=2),
    info=json_values.filter(lambda value: value is not None),
    part=parts,
    parts=st.lists(st.none() | parts, max_size=3),
)


def table_of(*batches: list[dict[str, Any]]) -> pa.Table:
    return pa.Table.from_batches([record_batch(batch, SCHEMA) for batch in batches], SCHEMA)


@given(st.lists(rows, max_size=4), st.lists(rows, max_size=2))
def test_rows_of_any_batches_come_back_as_they_were(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> None:
    assert rows_of(table_of(first, second), SCHEMA) == first + second


@given(st.lists(rows, max_size=4), st.integers(0, 4), st.integers(0, 4))
def test_a_slice_of_a_table_is_the_slice_of_its_rows(given_rows: list[dict[str, Any]], begin: int, length: int) -> None:
    assert rows_of(table_of(given_rows).slice(begin, length), SCHEMA) == given_rows[begin : begin + length]


def test_only_the_columns_that_are_asked_for_are_read() -> None:
    table = table_of([{"text": "a", "number": 1}])
    assert rows_of(table, pa.schema([("number", pa.int64()), ("other", pa.string())])) == [{"number": 1}]


def test_rows_without_any_column_are_empty_rows() -> None:
    assert rows_of(table_of([{"text": "a"}, {"text": "b"}]), pa.schema([("other", pa.string())])) == [{}, {}]


def test_fields_that_are_null_or_have_no_column_stand_in_further_fields() -> None:
    batch = record_batch([{"text": None, "beyond": [1]}, {"text": "a"}], SCHEMA)
    assert batch["text"].to_pylist() == [None, "a"]
    assert batch[FURTHER_FIELDS.name].to_pylist() == ['{"text":null,"beyond":[1]}', None]


def test_of_a_model_the_fields_that_were_set_are_written() -> None:
    class Part(BaseModel):
        model_config = ConfigDict(extra="allow")
        name: str | None = "default"
        count: int | None = None

    table = table_of([{"part": Part(count=None)}, {"parts": [Part(name="a", beyond=True)]}])  # type: ignore[call-arg]
    assert rows_of(table, SCHEMA) == [{"part": {"count": None}}, {"parts": [{"name": "a", "beyond": True}]}]


@pytest.mark.parametrize("row", [{"number": "one"}, {"number": 2**63}, {"counts": [2**31]}, {"part": {"count": "x"}}])
def test_a_value_that_does_not_fit_its_column_is_refused(row: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^A value does not fit its column: "):
        record_batch([row], SCHEMA)


@pytest.mark.parametrize("text", ["[]", "1", '"a"'])
def test_further_fields_that_are_no_object_are_refused(text: str) -> None:
    table = pa.table({FURTHER_FIELDS.name: pa.array([text])}, pa.schema([FURTHER_FIELDS]))
    with pytest.raises(ValueError, match=r"^further_fields holds something that is not a JSON object$"):
        rows_of(table, SCHEMA)


def test_numbers_may_be_wider_and_structs_may_lack_fields() -> None:
    part = pa.struct([("count", pa.int64())])
    table = pa.table({"counts": pa.array([[2**40], None]), "part": pa.array([{"count": 2**40}, None], part)})
    assert rows_of(table, SCHEMA) == [{"counts": [2**40], "part": {"count": 2**40}}, {}]
