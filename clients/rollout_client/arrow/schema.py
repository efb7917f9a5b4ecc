"""The contract of `POST /rollout` as Arrow: `application/vnd.apache.arrow.stream`. Needs the `arrow` extra.

An answer is two Arrow IPC streams, one right after the other; row i of both is the same rollout, in input order:

1. the rollouts (`ROLLOUTS`): everything but the numbers, in columns named as the fields of `SampleResult`, their
   buffers compressed by zstd. The schema's metadata hold the `summary` as JSON (`RolloutSummary`).
2. their tokens (`TOKENS`): the numbers of each message of the log, not compressed, so that the body's own bytes are
   what numpy and torch read.

Two streams, because Arrow compresses all buffers of a batch or none: text is worth it (it would be the tenth byte of a
token whose id and log-probability take eight), numbers that are to be used where they lie are not. Both can be read by
any Arrow library, and either comes in as many batches as the sender likes.

A request is one stream (`SAMPLES`): a row a sample, its `message_log` with its numbers; the schema's metadata may hold
the rest of the `RolloutRequest` as JSON, under `request`.

In all of them a null says that a field is not there. Each row and each struct has `further_fields`: a JSON object of
what no column has a place for, which is fields beyond the contract, and those that are there and null.
"""

import pyarrow as pa

ARROW = "application/vnd.apache.arrow.stream"
SUMMARY = b"summary"
REQUEST = b"request"
JSON_METADATA = {b"content-type": b"application/json"}


def json_text(name: str) -> pa.Field:
    """A column of JSON, which says so."""
    return pa.field(name, pa.string(), metadata=JSON_METADATA)


FURTHER_FIELDS = json_text("further_fields")

TOKEN_IDS = pa.list_(pa.int32())
LOGPROBS = pa.list_(pa.float32())
TOKENS = pa.schema([("token_ids", pa.list_(TOKEN_IDS)), ("generation_logprobs", pa.list_(LOGPROBS))])
"""One list a message; `generation_logprobs` has a null for a message that has none. The values of a batch lie in one
buffer each, end to end."""

SPAN = pa.struct(
    [("version", pa.string()), ("start", pa.int32()), ("end", pa.int32()), FURTHER_FIELDS],
)
ERROR = pa.struct(
    [("kind", pa.string()), ("message", pa.string()), ("retryable", pa.bool_()), FURTHER_FIELDS],
)
METRICS = pa.struct(
    [
        ("turn_count", pa.int32()),
        ("total_tokens", pa.int32()),
        ("assistant_tokens", pa.int32()),
        ("env_tokens", pa.int32()),
        ("terminated", pa.bool_()),
        ("truncated", pa.bool_()),
        ("max_turns_reached", pa.bool_()),
        ("total_reward", pa.float64()),
        ("turn_gen_tokens", pa.list_(pa.int32())),
        ("turn_input_tokens", pa.list_(pa.int32())),
        FURTHER_FIELDS,
    ]
)
MESSAGE_FIELDS = [
    pa.field("role", pa.string()),
    pa.field("content", pa.string()),
    pa.field("finish_reason", pa.string()),
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
        ("terminated", pa.bool_()),
        ("truncated", pa.bool_()),
        ("max_turns_reached", pa.bool_()),
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
PROMPT_MESSAGE = pa.struct(
    [
        ("role", pa.string()),
        ("content", pa.string()),
        ("name", pa.string()),
        json_text("tool_calls"),
        ("tool_call_id", pa.string()),
        FURTHER_FIELDS,
    ]
)
GIVEN_MESSAGE = pa.struct(
    [
        *MESSAGE_FIELDS,
        pa.field("token_ids", TOKEN_IDS),
        pa.field("generation_logprobs", LOGPROBS),
        FURTHER_FIELDS,
    ]
)
SAMPLES = pa.schema(
    [
        ("id", pa.string()),
        ("idx", pa.int64()),
        ("task_name", pa.string()),
        ("messages", pa.list_(PROMPT_MESSAGE)),
        ("message_log", pa.list_(GIVEN_MESSAGE)),
        json_text("extra_env_info"),
        ("stop_strings", pa.list_(pa.string())),
        ("observation_format", pa.string()),
        json_text("tools"),
        json_text("chat_template_kwargs"),
        ("seed", pa.int64()),
        FURTHER_FIELDS,
    ]
)
