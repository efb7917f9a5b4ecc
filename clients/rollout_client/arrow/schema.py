"""The schemas of an Arrow answer of `POST /rollout` (`application/vnd.apache.arrow.stream`). Needs the extra `arrow`.

An answer is two Arrow IPC streams, the second right after the first. Row i of both is the same rollout, in input order:

1. `ROLLOUTS`: everything except the numbers of the messages, in columns named like the fields of `SampleResult`. Its
   buffers are compressed with zstd. The schema's metadata hold the `RolloutSummary` as JSON, under `summary`.
2. `TOKENS`: the numbers of the messages. It is not compressed, so that numpy and torch can read the body in place. What
   the request has in `include` are further columns (`column_field`), named like the fields of `Message`.

There are two streams because Arrow compresses either all buffers of a batch or none. Compression pays for text, and
would prevent that numbers are read in place. Any Arrow library can read both; each may have any number of batches.

A null means that the field is absent. Each row and each struct has a column `further_fields`: a JSON object of the
fields that have no column, and of fields that are present with the value null.
"""

import json
import math
from collections.abc import Sequence

import pyarrow as pa

from rollout_client.contract.messages import MOST_DIMENSIONS, NUMBER_BYTES, NumberType

ARROW = "application/vnd.apache.arrow.stream"
SUMMARY = b"summary"
JSON_METADATA = {b"content-type": b"application/json"}


def json_text(name: str) -> pa.Field:
    """A column of JSON texts, marked as such in its metadata."""
    return pa.field(name, pa.string(), metadata=JSON_METADATA)


FURTHER_FIELDS = json_text("further_fields")

TOKEN_IDS = pa.list_(pa.int32())
LOGPROBS = pa.list_(pa.float32())
TOKENS = pa.schema([("token_ids", pa.list_(TOKEN_IDS)), ("generation_logprobs", pa.list_(LOGPROBS))])
"""One list per message; `generation_logprobs` has a null for a message without them. All values of a column's batch are
contiguous in one buffer."""


def column_field(name: str, dtype: NumberType, row: Sequence[int]) -> pa.Field:
    """A column of `PackedNumbers`: one list per message, null for a message without them.

    A row of more than one number is binary of fixed size; the metadata have its `dtype` and, as JSON, its `shape`.
    """
    width = math.prod(row) * NUMBER_BYTES[dtype]
    value = pa.binary(width) if row else pa.type_for_alias(dtype)
    metadata = {"dtype": dtype, "shape": json.dumps(list(row))}
    return pa.field(name, pa.list_(pa.list_(value)), metadata=metadata)


def row_of(field: pa.Field) -> tuple[NumberType, list[int]]:
    """The type and shape that `column_field` was given.

    Raises `KeyError`, `TypeError`, `ValueError` or `RecursionError` for another field.
    """
    metadata = field.metadata or {}
    dtype, row = metadata[b"dtype"].decode(), json.loads(metadata[b"shape"])
    counts = row if isinstance(row, list) and len(row) < MOST_DIMENSIONS else [None]
    if not all(isinstance(count, int) and 0 < count < 2**31 for count in counts):
        raise ValueError(f"{field.name} has rows of no shape that there is")
    return dtype, row


def _fields(type_: pa.DataType, *names: str) -> list[pa.Field]:
    return [pa.field(name, type_) for name in names]


ENDINGS = _fields(pa.bool_(), "terminated", "truncated", "max_turns_reached")
SPAN = pa.struct([("version", pa.string()), *_fields(pa.int32(), "start", "end"), FURTHER_FIELDS])
ERROR = pa.struct([*_fields(pa.string(), "kind", "message"), ("retryable", pa.bool_()), FURTHER_FIELDS])
METRICS = pa.struct(
    [
        *_fields(pa.int32(), "turn_count", "total_tokens", "assistant_tokens", "env_tokens"),
        *ENDINGS,
        ("total_reward", pa.float64()),
        *_fields(pa.list_(pa.int32()), "turn_gen_tokens", "turn_input_tokens"),
        FURTHER_FIELDS,
    ]
)
MESSAGE_FIELDS = [
    *_fields(pa.string(), "role", "content", "finish_reason"),
    pa.field("weight_versions", pa.list_(SPAN)),
    pa.field("reward", pa.float64()),
]
MESSAGE = pa.struct([*MESSAGE_FIELDS, FURTHER_FIELDS])
ROLLOUTS = pa.schema(
    [
        ("id", pa.string()),
        ("idx", pa.int64()),
        ("generation_index", pa.int32()),
        ("task_name", pa.string()),
        ("message_log", pa.list_(MESSAGE)),
        ("total_reward", pa.float64()),
        ("rewards", pa.map_(pa.string(), pa.float64())),
        ("status", pa.string()),
        ("error", ERROR),
        *ENDINGS,
        json_text("extra_env_info"),
        ("stop_strings", pa.list_(pa.string())),
        ("observation_format", pa.string()),
        json_text("tools"),
        json_text("chat_template_kwargs"),
        ("answer", pa.string()),
        ("metrics", METRICS),
        FURTHER_FIELDS,
    ]
)
