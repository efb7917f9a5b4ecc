"""Rows of fields as Arrow columns and back, exactly: what was null stays null, what was not there stays away.

A row is a dict, as are the structs in it; a pydantic model stands for the fields of it that were set.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate, chain, pairwise
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


def rows_of(table: pa.Table, fields: pa.Schema) -> list[dict[str, Any]]:
    """The rows of `table` as they were before they became columns, as far as `fields` has them.

    Raises `ValueError` if a text that must be JSON is none.
    """
    there = [field for field in fields if field.name in table.schema.names]
    return [
        row
        for batch in table.to_batches()
        for row in rows([batch[field.name] for field in there], there, batch.num_rows)
    ]


def rows(arrays: Sequence[pa.Array], fields: Sequence[pa.Field], count: int) -> list[dict[str, Any]]:
    columns = [values_of(array, field.type) for array, field in zip(arrays, fields, strict=True)]
    by_row = zip(*columns, strict=True) if columns else [()] * count
    names = [field.name for field in fields]
    return [whole(dict(zip(names, values, strict=True))) for values in by_row]


def whole(row: Row) -> dict[str, Any]:
    """What is said in a row of columns: what is not null, and its further fields."""
    said = {name: value for name, value in row.items() if value is not None}
    further = said.pop(FURTHER_FIELDS, {})
    if not isinstance(further, dict):
        raise ValueError(f"{FURTHER_FIELDS} holds something that is no JSON object")
    return said | further


def values_of(array: pa.Array, type_: pa.DataType) -> list[Any]:
    """The values of `array`, read as `type_`: it may have fewer fields, wider numbers, and JSON as plain text."""
    if type_ == JSON_TEXT:
        return [None if text is None else from_json(text) for text in array.to_pylist()]
    if pa.types.is_struct(type_):
        there = [field for field in type_ if array.type.get_field_index(field.name) >= 0]
        of_all = rows([array.field(field.name) for field in there], there, len(array))
        return only_valid(of_all, array)
    if pa.types.is_list(type_):
        items = values_of(array.values, type_.value_type)
        return only_valid([items[begin:end] for begin, end in pairwise(array.offsets.to_numpy().tolist())], array)
    if pa.types.is_map(type_):
        return array.to_pylist(maps_as_pydicts="strict")  # type: ignore[no-any-return]
    if array.null_count == 0 and (pa.types.is_integer(type_) or pa.types.is_floating(type_)):
        # Arrow's own way makes an object of its own of every value first, which takes five times as long.
        return array.to_numpy().tolist()  # type: ignore[no-any-return]
    return array.to_pylist()  # type: ignore[no-any-return]


def only_valid(values: list[Any], array: pa.Array) -> list[Any]:
    if array.null_count == 0:
        return values
    return [value if valid else None for value, valid in zip(values, array.is_valid().to_pylist(), strict=True)]
