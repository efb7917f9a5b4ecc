"""Rows of fields as Arrow columns and back, exactly: what was null stays null, what was not there stays away.

A row is a dict, as are the structs in it; a pydantic model stands for the fields of it that were set.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate, chain, pairwise
from typing import Any

import pyarrow as pa
from pydantic import BaseModel
from pydantic_core import from_json, to_json

from rollout_client.arrow.schema import FURTHER_FIELDS, JSON_METADATA
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
    held = frozenset(fields.names) - {FURTHER_FIELDS.name}
    return [column(cells(said, field.name, held), field) for field in fields]


def cells(rows: Sequence[Row], name: str, held: frozenset[str]) -> list[Any]:
    """One a row: what it says of `name`, or all that is not `held` by a column."""
    if name == FURTHER_FIELDS.name:
        return [further_fields(row, held) for row in rows]
    return [row.get(name) for row in rows]


def further_fields(row: Row, held: frozenset[str]) -> Row | None:
    return {name: value for name, value in row.items() if value is None or name not in held} or None


def column(values: Sequence[Any], field: pa.Field) -> pa.Array:
    type_ = field.type
    if is_json(field):
        return pa.array([None if value is None else to_json(value).decode() for value in values], type_)
    if pa.types.is_struct(type_):
        rows = [set_fields(value) if isinstance(value, BaseModel) else value for value in values]
        return pa.StructArray.from_arrays(children(rows, type_), fields=list(type_), mask=nulls(rows))
    if pa.types.is_list(type_) and pa.types.is_struct(type_.value_type):
        items = column(list(chain.from_iterable(value or () for value in values)), type_.value_field)
        return pa.ListArray.from_arrays(offsets(values), items, type=type_, mask=nulls(values))
    if pa.types.is_map(type_):
        values = [None if value is None else list(value.items()) for value in values]
    return pa.array(values, type_)


def is_json(field: pa.Field) -> bool:
    return JSON_METADATA.items() <= (field.metadata or {}).items()


def offsets(lists: Sequence[Sequence[object] | None]) -> pa.Array:
    """Where each list begins among the values of all, and where the last one ends."""
    return pa.array(accumulate((len(items or ()) for items in lists), initial=0), pa.int32())


def nulls(values: Sequence[object]) -> pa.Array:
    return pa.array([value is None for value in values], pa.bool_())


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
    columns = [values_of(array, field) for array, field in zip(arrays, fields, strict=True)]
    by_row = zip(*columns, strict=True) if columns else [()] * count
    names = [field.name for field in fields]
    return [whole(dict(zip(names, values, strict=True))) for values in by_row]


def whole(row: Row) -> dict[str, Any]:
    """What is said in a row of columns: what is not null, and its further fields."""
    said = {name: value for name, value in row.items() if value is not None}
    further = said.pop(FURTHER_FIELDS.name, {})
    if not isinstance(further, dict):
        raise ValueError(f"{FURTHER_FIELDS.name} holds something that is no JSON object")
    return said | further


def values_of(array: pa.Array, field: pa.Field) -> list[Any]:
    """The values of `array`, read as `field`: it may have fewer fields and wider numbers."""
    type_ = field.type
    if is_json(field):
        return [None if text is None else from_json(text) for text in array.to_pylist()]
    if pa.types.is_struct(type_):
        there = [child for child in type_ if array.type.get_field_index(child.name) >= 0]
        return only_valid(rows([array.field(child.name) for child in there], there, len(array)), array)
    if pa.types.is_list(type_):
        items = values_of(array.values, type_.value_field)
        return only_valid([items[begin:end] for begin, end in pairwise(array.offsets.to_numpy().tolist())], array)
    if pa.types.is_map(type_):
        pairs = list(zip(array.keys.to_pylist(), array.items.to_pylist(), strict=True))
        return only_valid([dict(pairs[begin:end]) for begin, end in pairwise(array.offsets.to_pylist())], array)
    if array.null_count == 0 and (pa.types.is_integer(type_) or pa.types.is_floating(type_)):
        # Arrow's own way makes an object of its own of every value first, which takes five times as long.
        return array.to_numpy().tolist()  # type: ignore[no-any-return]
    return array.to_pylist()  # type: ignore[no-any-return]


def only_valid(values: list[Any], array: pa.Array) -> list[Any]:
    if array.null_count == 0:
        return values
    return [value if valid else None for value, valid in zip(values, array.is_valid().to_pylist(), strict=True)]
