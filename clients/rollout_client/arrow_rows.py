"""Rows of fields as Arrow columns and back, exactly: what was null stays null, what was not there stays away.

A row is a dict, as are the structs in it; a pydantic model stands for the fields of it that were set.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate, chain
from typing import Any

import pyarrow as pa
from pydantic import BaseModel
from pydantic_core import from_json, to_json

from rollout_client.arrow import FURTHER_FIELDS, JSON_TEXT
from rollout_client.set_fields import set_fields

Row = Mapping[str, Any]


def record_batch(rows: Sequence[Row], schema: pa.Schema) -> pa.RecordBatch:
    """Raises `ValueError` if a value is of another type than its column."""
    try:
        return pa.RecordBatch.from_arrays(children(rows, schema), schema=schema)
    except (pa.ArrowException, OverflowError) as error:
        raise ValueError(f"A value does not fit its column: {error}") from error


def children(rows: Sequence[Row | None], fields: pa.Schema | pa.StructType) -> list[pa.Array]:
    """One array a field, over all rows."""
    said: list[Row] = [{} if row is None else row for row in rows]
    held = frozenset(fields.names) - {FURTHER_FIELDS}
    return [
        column(
            [further_fields(row, held) if field.name == FURTHER_FIELDS else row.get(field.name) for row in said],
            field.type,
        )
        for field in fields
    ]


def further_fields(row: Row, held: frozenset[str]) -> Row | None:
    return {name: value for name, value in row.items() if value is None or name not in held} or None


def column(values: Sequence[Any], type_: pa.DataType) -> pa.Array:
    if type_ == JSON_TEXT:
        texts = [None if value is None else to_json(value).decode() for value in values]
        return pa.ExtensionArray.from_storage(type_, pa.array(texts, pa.string()))
    if pa.types.is_struct(type_):
        rows = [set_fields(value) if isinstance(value, BaseModel) else value for value in values]
        is_null = pa.array([row is None for row in rows], pa.bool_())
        return pa.StructArray.from_arrays(children(rows, type_), fields=list(type_), mask=is_null)
    if pa.types.is_list(type_) and pa.types.is_struct(type_.value_type):
        items = column(list(chain.from_iterable(value or () for value in values)), type_.value_type)
        return pa.ListArray.from_arrays(offsets(values), items, type=type_, mask=nulls(values))
    if pa.types.is_map(type_):
        values = [None if value is None else list(value.items()) for value in values]
    return pa.array(values, type_)


def offsets(lists: Sequence[Sequence[object] | None]) -> pa.Array:
    """Where each list begins among the values of all, and where the last one ends."""
    return pa.array(accumulate((len(items or ()) for items in lists), initial=0), pa.int32())


def nulls(lists: Sequence[object]) -> pa.Array:
    return pa.array([items is None for items in lists], pa.bool_())


def rows_of(table: pa.Table) -> list[dict[str, Any]]:
    """The rows of `table`, as they were before they became columns.

    Raises `ValueError` if a text that must be JSON is none.
    """
    type_ = pa.struct(list(table.schema))
    return [row_of(row, type_) for row in table.to_pylist(maps_as_pydicts="strict")]


def row_of(row: Row, type_: pa.StructType) -> dict[str, Any]:
    said = {
        field.name: value_of(row[field.name], field.type)
        for field in type_
        if field.name != FURTHER_FIELDS and row[field.name] is not None
    }
    further = from_json(row.get(FURTHER_FIELDS) or "{}")
    if not isinstance(further, dict):
        raise ValueError(f"{FURTHER_FIELDS} holds something that is no JSON object")
    return said | further


def value_of(value: Any, type_: pa.DataType) -> Any:
    if value is None:
        return None
    if type_ == JSON_TEXT:
        return from_json(value)
    if pa.types.is_struct(type_):
        return row_of(value, type_)
    if pa.types.is_list(type_) and pa.types.is_struct(type_.value_type):
        return [value_of(item, type_.value_type) for item in value]
    return value
