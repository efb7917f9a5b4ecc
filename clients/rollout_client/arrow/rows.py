"""Rows of fields as Arrow columns and back without loss: null stays null, and an absent field stays absent.

A row is a dict, and so is a struct in it. In place of a dict, a struct may be a pydantic model: then the fields that
were set are the struct's.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate, chain, pairwise
from typing import Any

import pyarrow as pa
from pydantic import BaseModel
from pydantic_core import from_json, to_json

from rollout_client.arrow.schema import FURTHER_FIELDS, JSON_METADATA
from rollout_client.contract.base import set_fields

Row = Mapping[str, Any]


def record_batch(rows: Sequence[Row], schema: pa.Schema) -> pa.RecordBatch:
    """`rows` as columns of `schema`; raises `ValueError` if a value does not fit the type of its column."""
    try:
        return pa.RecordBatch.from_arrays(_field_columns(rows, schema), schema=schema)
    except (pa.ArrowException, OverflowError) as error:
        raise ValueError(f"A value does not fit its column: {error}") from error


def _field_columns(rows: Sequence[Row | None], fields: pa.Schema | pa.StructType) -> list[pa.Array]:
    """One array per field, with one value per row; a row that is `None` has no fields."""
    present: list[Row] = [{} if row is None else row for row in rows]
    names = frozenset(fields.names) - {FURTHER_FIELDS.name}
    columns = {name: [row.get(name) for row in present] for name in names}
    columns[FURTHER_FIELDS.name] = [_further_fields(row, names) for row in present]
    return [_column(columns[field.name], field) for field in fields]


def _further_fields(row: Row, names: frozenset[str]) -> Row | None:
    """The fields that no column can hold: those without one of `names`, and those that are null rather than absent."""
    return {name: value for name, value in row.items() if value is None or name not in names} or None


def _column(values: Sequence[Any], field: pa.Field) -> pa.Array:
    type_ = field.type
    if _is_json(field):
        return pa.array([None if value is None else to_json(value).decode() for value in values], type_)
    if pa.types.is_struct(type_):
        rows = [set_fields(value) if isinstance(value, BaseModel) else value for value in values]
        return pa.StructArray.from_arrays(_field_columns(rows, type_), fields=list(type_), mask=_null_mask(rows))
    if pa.types.is_list(type_) and pa.types.is_struct(type_.value_type):
        items = _column(list(chain.from_iterable(value or () for value in values)), type_.value_field)
        return pa.ListArray.from_arrays(_offsets(values), items, type=type_, mask=_null_mask(values))
    if pa.types.is_map(type_):
        # Older versions of pyarrow make a map only of pairs, not of a dict.
        values = [None if value is None else list(value.items()) for value in values]
    return pa.array(values, type_)


def _is_json(field: pa.Field) -> bool:
    return JSON_METADATA.items() <= (field.metadata or {}).items()


def _offsets(lists: Sequence[Sequence[object] | None]) -> pa.Array:
    """The index at which each list begins among the values of all lists, then the index after the last value."""
    return pa.array(accumulate((len(items or ()) for items in lists), initial=0), pa.int32())


def _null_mask(values: Sequence[object]) -> pa.Array:
    return pa.array([value is None for value in values], pa.bool_())


def rows_of(table: pa.Table, fields: pa.Schema) -> list[dict[str, Any]]:
    """The inverse of `record_batch`: the rows of `table`, with the columns that `fields` names.

    Raises `ValueError` if a text of a JSON column is not JSON.
    """
    present = [field for field in fields if field.name in table.schema.names]
    return [
        row
        for batch in table.to_batches()
        for row in _rows_of_columns([batch[field.name] for field in present], present, batch.num_rows)
    ]


def _rows_of_columns(arrays: Sequence[pa.Array], fields: Sequence[pa.Field], count: int) -> list[dict[str, Any]]:
    columns = [values_of(array, field) for array, field in zip(arrays, fields, strict=True)]
    by_row = zip(*columns, strict=True) if columns else [()] * count
    names = [field.name for field in fields]
    return [_with_further_fields(dict(zip(names, values, strict=True))) for values in by_row]


def _with_further_fields(row: Row) -> dict[str, Any]:
    """The fields of a row of columns: those that are not null, and its further fields."""
    present = {name: value for name, value in row.items() if value is not None}
    further = present.pop(FURTHER_FIELDS.name, {})
    if not isinstance(further, dict):
        raise ValueError(f"{FURTHER_FIELDS.name} holds something that is not a JSON object")
    return present | further


def values_of(array: pa.Array, field: pa.Field) -> list[Any]:
    """The values of `array` as Python objects. Its type may differ from `field`'s by fewer fields or wider numbers."""
    type_ = field.type
    if _is_json(field):
        return [None if text is None else from_json(text) for text in array.to_pylist()]
    if pa.types.is_struct(type_):
        present = [child for child in type_ if array.type.get_field_index(child.name) >= 0]
        structs = _rows_of_columns([array.field(child.name) for child in present], present, len(array))
        return _with_nulls(structs, array)
    if pa.types.is_list(type_):
        items = values_of(array.values, type_.value_field)
        return _with_nulls([items[begin:end] for begin, end in pairwise(array.offsets.to_numpy().tolist())], array)
    if pa.types.is_map(type_):
        pairs = list(zip(array.keys.to_pylist(), array.items.to_pylist(), strict=True))
        return _with_nulls([dict(pairs[begin:end]) for begin, end in pairwise(array.offsets.to_pylist())], array)
    if array.null_count == 0 and (pa.types.is_integer(type_) or pa.types.is_floating(type_)):
        # to_pylist makes an Arrow scalar of each value first, which takes five times as long.
        return array.to_numpy().tolist()  # type: ignore[no-any-return]
    return array.to_pylist()  # type: ignore[no-any-return]


def _with_nulls(values: list[Any], array: pa.Array) -> list[Any]:
    """`values`, with `None` wherever `array` is null."""
    if array.null_count == 0:
        return values
    return [value if valid else None for value, valid in zip(values, array.is_valid().to_pylist(), strict=True)]
