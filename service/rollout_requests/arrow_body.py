"""Reads the Arrow body of `POST /rollout`, which `rollout_client/calls/arrow_bodies.py` writes, as untrusted bytes.

Guarantee: the memory that is needed is in proportion to the size of the body. Therefore no buffer may be compressed,
and columns have only the types of the contract, in which every value takes bytes of its own.
"""

from collections.abc import Iterator, Sequence
from struct import unpack_from
from typing import Any

import pyarrow as pa
from pydantic_core import from_json

from rollout_client.arrow.rows import rows_of
from rollout_client.arrow.schema import REQUEST, SAMPLES
from rollout_client.contract.problems import FieldProblem
from service.problems import invalid_request, unreadable_body

HEADER_OF_MESSAGE = 2
COMPRESSION_OF_BATCH = 3
"""Indices of these fields in the tables `Message` and `RecordBatch` of Arrow's flatbuffers."""


def arrow_fields(body: bytes | bytearray) -> dict[str, Any]:
    """The fields of the request in an Arrow stream, as its JSON would have them.

    Raises:
        RequestProblem: the body is not an Arrow stream (400), or has columns that the contract does not have (422).
    """
    try:
        table = read_table(body, SAMPLES, ["task_name"], "samples[]")
        return {**_options_of(table.schema), "samples": rows_of(table, SAMPLES)}
    except (pa.ArrowException, OSError, ValueError) as error:
        raise unreadable_body(f"{str(error).rstrip('.')}; send one Arrow stream of samples") from error


def _options_of(schema: pa.Schema) -> dict[str, Any]:
    """The fields of the request other than its samples."""
    options = from_json((schema.metadata or {}).get(REQUEST, b"{}"))
    if not isinstance(options, dict):
        raise ValueError(f"the schema's metadata hold a {REQUEST.decode()} that is not a JSON object")
    return options


def read_table(body: bytes | bytearray, wanted: pa.Schema, required: Sequence[str], row: str) -> pa.Table:
    """The one table of an Arrow stream.

    Args:
        wanted: the columns that it may have.
        required: those that it must have.
        row: the name of a row in problems.

    Raises:
        RequestProblem: it has other columns.
        ArrowException, OSError, ValueError: it is not an Arrow stream.
    """
    messages = pa.ipc.MessageReader.open_stream(pa.BufferReader(body))
    first = next(messages, None)
    # pyarrow would read a schema from a message of another kind as well, and crash.
    if first is None or first.type != "schema":
        raise ValueError("it does not begin with a schema")
    schema = pa.ipc.read_schema(first)
    if problems := list(_column_problems(schema, wanted, required, row)):
        raise invalid_request(*problems)
    table = pa.Table.from_batches(list(_record_batches(messages, schema)), schema)
    # Otherwise offsets beyond their buffers would be read.
    table.validate(full=True)
    return table


def _record_batches(messages: pa.ipc.MessageReader, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    for message in messages:
        if message.type != "record batch":
            raise ValueError(f"it holds a {message.type} where a record batch must be")
        if _is_compressed(message.metadata):
            raise ValueError("its buffers are compressed; compress the body as a whole, with Content-Encoding")
        yield pa.ipc.read_record_batch(message, schema)


def _is_compressed(message: pa.Buffer) -> bool:
    """Whether a record batch has compressed buffers, which pyarrow would decompress without a bound.

    Reads the flatbuffer itself, which pyarrow has verified.
    """
    metadata = message.to_pybytes()
    batch = _field_offset(metadata, unpack_from("<I", metadata)[0], HEADER_OF_MESSAGE)
    return _field_offset(metadata, batch + unpack_from("<I", metadata, batch)[0], COMPRESSION_OF_BATCH) != 0


def _field_offset(flatbuffer: bytes, table: int, field: int) -> int:
    """Offset of a field of the table at offset `table`; 0 if the field is not set."""
    vtable = table - unpack_from("<i", flatbuffer, table)[0]
    entry = 4 + 2 * field
    if entry >= unpack_from("<H", flatbuffer, vtable)[0]:
        return 0
    offset: int = unpack_from("<H", flatbuffer, vtable + entry)[0]
    return table + offset if offset else 0


def _column_problems(schema: pa.Schema, wanted: pa.Schema, required: Sequence[str], row: str) -> Iterator[FieldProblem]:
    def problem(name: str, message: str, value: str | None = None) -> FieldProblem:
        return FieldProblem(field=f"{row}.{name}".removesuffix("."), message=message, value=value)

    for field in schema:
        if field.name not in wanted.names:
            known = ", ".join(wanted.names)
            yield problem(field.name, f"there is no such column; the known ones are {known}", str(field.type))
        elif not _is_like(field.type, wanted.field(field.name).type):
            yield problem(field.name, f"the column must be {wanted.field(field.name).type}", str(field.type))
    if len(set(schema.names)) < len(schema.names):
        yield problem("", "a column occurs twice")
    yield from (problem(name, "this column is missing") for name in required if name not in schema.names)


def _is_like(given: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether the types are equal, except that numbers may be wider or narrower and structs may lack fields."""
    if pa.types.is_struct(wanted):
        return (
            pa.types.is_struct(given) and given.num_fields > 0 and all(_is_field_of(field, wanted) for field in given)
        )
    if pa.types.is_list(wanted):
        return pa.types.is_list(given) and _is_like(given.value_type, wanted.value_type)
    if pa.types.is_integer(wanted):
        return given in (pa.int32(), pa.int64())
    if pa.types.is_floating(wanted):
        return given in (pa.float32(), pa.float64())
    return bool(given == wanted)


def _is_field_of(field: pa.Field, struct: pa.StructType) -> bool:
    index = struct.get_field_index(field.name)
    return index >= 0 and _is_like(field.type, struct.field(index).type)
