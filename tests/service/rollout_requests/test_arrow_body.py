"""Requests as Arrow and compressed ones: the same as plain JSON, within bounds, and refused with what is wrong."""

import gzip
import json
from contextlib import suppress
from struct import pack
from typing import Any

import pyarrow as pa
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from rollout_client import NotJson, RolloutRequest, SampleInput, Sampling
from rollout_client.arrow.schema import ARROW, REQUEST
from rollout_client.calls.arrow_bodies import arrow_body
from rollout_client.calls.rollouts import arrow_rollout_call, rollout_body
from service.problems import RequestProblem
from service.rollout_requests.parsing import parsed_body
from tests.clients.scripted_service import Json
from tests.service.rollout_requests.test_arrow_encoder import fields, json_values, objects, texts
from tests.service.scripted_http import ScriptedHttp

GOOD: Json = {"task_name": "math", "message_log": [{"role": "user", "content": "a", "token_ids": [64]}]}
LIMIT = 4096
parts = st.lists(
    st.fixed_dictionaries({"type": st.just("text"), "text": texts})
    | st.just({"type": "image", "image": f"sha256:{'0a' * 32}"}),
    max_size=2,
)
prompt_messages = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user"]), "content": texts | parts},
    optional={"name": st.none() | texts, "tool_calls": st.none() | st.lists(objects, max_size=2)},
)
given_messages = st.builds(
    lambda message, ids, more: {**message, "token_ids": ids, **more(ids)},
    st.fixed_dictionaries({"role": st.just("assistant"), "content": texts}),
    st.lists(st.integers(0, 2**31 - 1), max_size=3),
    st.sampled_from(
        [
            lambda _: {},
            lambda _: {"generation_logprobs": None, "reward": None},
            lambda ids: {
                "generation_logprobs": [-0.5] * len(ids),
                "finish_reason": "stop",
                "reward": 1.0,
                "weight_versions": [{"version": "1", "start": 0, "end": 1, "further": json.loads("[1]")}],
            },
        ]
    ),
)
options = st.fixed_dictionaries(
    {},
    optional={"num_generations": st.integers(1, 9), "sampling": st.just(Sampling(temperature=0.5)), "keep": st.none()},
)
prompts = st.one_of(
    st.fixed_dictionaries({"messages": st.lists(prompt_messages, min_size=1, max_size=2)}),
    st.fixed_dictionaries({"message_log": st.lists(given_messages, min_size=1, max_size=2)}),
)
rest = fields(
    {"task_name": texts},
    {
        "id": st.none() | texts,
        "idx": st.none() | st.integers(-(2**63), 2**63 - 1),
        "extra_env_info": objects,
        "stop_strings": st.none() | st.lists(st.text(min_size=1, max_size=3), max_size=2),
        "observation_format": st.none() | st.sampled_from(["chat", "raw"]),
        "tools": st.none() | st.lists(objects, max_size=1),
        "chat_template_kwargs": st.none() | objects,
        "seed": st.none() | st.integers(0, 2**63 - 1),
        "further_fields": json_values,
        "messages": st.none(),
    },
)
samples = st.builds(lambda sample, prompt: {**sample, **prompt}, rest, prompts)


def table_body(**columns: Any) -> bytes:
    return stream_of(pa.table({"task_name": ["math"]} | columns))


def stream_of(table: pa.Table, compression: str | None = None) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_table(table)
    body: bytes = sink.getvalue().to_pybytes()
    return body


# The same as JSON


@given(st.lists(samples, min_size=1, max_size=3), options)
def test_an_arrow_body_is_the_same_request_as_a_json_body(given_samples: list[Json], options: Any) -> None:
    by_json = RolloutRequest.model_validate_json(rollout_body(given_samples, options), strict=True)
    body = arrow_rollout_call(given_samples, options).body
    assert body is not None
    by_arrow = parsed_body(body, ARROW)
    assert by_arrow == by_json
    assert by_arrow.model_dump(exclude_unset=True) == by_json.model_dump(exclude_unset=True)


def test_typed_samples_are_sent_without_the_fields_that_were_not_set() -> None:
    request = parsed_body(arrow_body([SampleInput.model_validate(GOOD)], {}), ARROW)
    assert request.samples[0].model_dump(exclude_unset=True) == GOOD


def test_a_table_made_by_hand_is_read_with_the_types_that_arrow_finds_by_itself() -> None:
    service = ScriptedHttp()
    table = pa.Table.from_pylist([GOOD, {**GOOD, "task_name": "sliding_puzzle"}])
    assert table.schema.field("message_log").type.value_type.field("token_ids").type == pa.list_(pa.int64())
    table = table.replace_schema_metadata({REQUEST: json.dumps({"num_generations": 2})})
    answer = service.post(stream_of(table), content_type=ARROW)
    assert [sample["task_name"] for sample in answer.json()["samples"]] == ["math"] * 2 + ["sliding_puzzle"] * 2


def test_a_value_that_fits_no_column_is_a_value_error_before_anything_is_sent() -> None:
    with pytest.raises(ValueError, match="does not fit its column"):
        arrow_body([{"task_name": 7}], {})
    with pytest.raises(NotJson, match=r"samples\[0\]\.handle: a value of type object cannot be sent"):
        arrow_body([{**GOOD, "handle": object()}], {})


# What is refused


@pytest.mark.parametrize(
    ("body", "field", "says"),
    [
        (table_body(taks=["x"]), "samples[].taks", "there is no such column; the known ones are id, idx, task_name"),
        (stream_of(pa.table({"id": ["x"]})), "samples[].task_name", "this column is missing"),
        (table_body(idx=["1"]), "samples[].idx", "the column must be int64"),
        (table_body(id=pa.array(["x"]).dictionary_encode()), "samples[].id", "the column must be string"),
        (table_body(id=pa.nulls(1)), "samples[].id", "the column must be string"),
        (table_body(message_log=pa.array([[{}]])), "samples[].message_log", "the column must be list<"),
        (table_body(message_log=pa.array([[{"word": "x"}]])), "samples[].message_log", "the column must be list<"),
        (
            table_body(message_log=pa.array([[{"role": "user", "word": "x"}]])),
            "samples[].message_log",
            "the column must be list<",
        ),
        (
            stream_of(pa.table([pa.array(["math"]), pa.array(["math"])], names=["task_name", "task_name"])),
            "samples[]",
            "a column occurs twice",
        ),
        (table_body(stop_strings=pa.array([[None]])), "samples[].stop_strings", "the column must be list<"),
        (arrow_body([{**GOOD, "task_name": "chess"}], {}), "samples[0].task_name", "there is no task 'chess'"),
        (arrow_body([{"task_name": "math"}], {}), "samples[0]", "messages and message_log are both missing"),
        (arrow_body([GOOD], {"sampling": {"top_p": 0}}), "sampling.top_p", "greater than 0"),
        (arrow_body([GOOD], {"num_generation": 4}), "num_generation", "not known"),
        (arrow_body([{**GOOD, "message_log": [None]}], {}), "samples[0].message_log[0]", "should be an object"),
    ],
)
def test_an_invalid_arrow_request_names_its_field_and_starts_nothing(body: bytes, field: str, says: str) -> None:
    service = ScriptedHttp()
    answer = service.post(body, content_type=ARROW)
    assert (answer.status_code, answer.headers["content-type"]) == (422, "application/problem+json")
    assert [error["field"] for error in answer.json()["errors"]] == [field]
    assert says in answer.json()["errors"][0]["message"]
    assert not service.has_started_something


BODY = arrow_body([GOOD], {})
INVALID_OFFSETS = table_body(stop_strings=[["x"] * 77]).replace(pack("<2i", 0, 77), pack("<2i", 0, 1077))
INVALID_INNER_OFFSETS = table_body(stop_strings=[["x"] * 3]).replace(pack("<4i", 0, 1, 2, 3), pack("<4i", 0, 1, 77, 3))


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "send one Arrow stream of samples"),
        (b'{"samples": []}', "send one Arrow stream of samples"),
        (BODY[: len(BODY) // 2], "send one Arrow stream of samples"),
        (INVALID_OFFSETS, "send one Arrow stream of samples"),
        (INVALID_INNER_OFFSETS, "out of bounds: 77 > 3; send one Arrow stream of samples"),
        (table_body(extra_env_info=["{"]), "EOF while parsing an object"),
        (table_body(further_fields=["[]"]), "further_fields holds something that is not a JSON object"),
        (stream_of(pa.table({"task_name": ["x" * 99]}), "zstd"), "compress the body as a whole"),
        (stream_of(pa.table({"task_name": ["x" * 99]}), "lz4"), "compress the body as a whole"),
        (stream_of(pa.table({"task_name": ["x"]}, metadata={REQUEST: b"7"})), "request that is not a JSON object"),
    ],
)
def test_an_arrow_body_that_cannot_be_read_is_refused_and_starts_nothing(body: bytes, says: str) -> None:
    service = ScriptedHttp()
    answer = service.post(body, content_type=ARROW)
    assert (answer.status_code, answer.headers["content-type"]) == (400, "application/problem+json")
    assert says in answer.json()["errors"][0]["message"]
    assert not service.has_started_something


@given(st.integers(0), st.integers(0, 255))
def test_a_damaged_byte_is_a_problem_or_a_request_and_no_crash(place: int, value: int) -> None:
    body = bytearray(BODY)
    body[place % len(body)] = value
    with suppress(RequestProblem):
        assert len(parsed_body(body, ARROW).samples) == 1


# Compressed bodies

JSON_BODY = json.dumps({"samples": [GOOD]}).encode()


@pytest.mark.parametrize(("coding", "compress"), [("gzip", gzip.compress), ("zstd", zstandard.compress)])
@pytest.mark.parametrize("is_arrow", [False, True])
def test_a_compressed_body_is_the_same_request(coding: str, compress: Any, is_arrow: bool) -> None:
    body, kind = (BODY, ARROW) if is_arrow else (JSON_BODY, "application/json")
    answer = ScriptedHttp().post(compress(body), content_encoding=coding, content_type=kind)
    assert answer.json()["samples"][0]["status"] == "completed"
