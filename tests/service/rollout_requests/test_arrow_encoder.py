"""An answer as Arrow: the same as the JSON answer, its numbers where they arrived, and never half of it."""

import base64
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deployments.failures import GenerationRejected
from deployments.protocols.token_columns import packed_rows
from rollout_client import ResponseNotUnderstood, RolloutError, RolloutResponse, RolloutSummary, SampleResult, staleness
from rollout_client.arrow.rows import record_batch
from rollout_client.arrow.schema import ARROW
from rollout_client.calls.arrow_bodies import ArrowResponse, read_response
from rollout_client.contract.base import label_of
from rollout_client.contract.messages import NUMBER_BYTES, Message, NumberType
from rollout_client.contract.rollouts import PolicyVersions
from rollout_client.tensors import Credit, NotFinal, PaddingSide, RolloutTensors, to_tensors
from rollout_client.tensors.arrow_rollouts import arrow_rollouts, rows_at
from rollout_client.tensors.rollouts import idx_of
from rollout_env import StepOutcome
from service.rollout_requests import arrow_encoder
from service.rollout_requests.arrow_encoder import CHARACTERS_PER_MESSAGE, ArrowResponseEncoder
from service.rollout_requests.result_encoding import JsonResponseEncoder
from service.settings import RequestLimits
from tests.clients.scripted_service import SUMMARY, Json, result
from tests.service.scripted_http import ScriptedHttp

SAMPLE = {"task_name": "math", "messages": [{"role": "user", "content": "Hi"}], "note": None}
texts = st.text(max_size=8)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda values: st.lists(values, max_size=3) | st.dictionaries(texts, values, max_size=3),
    max_leaves=5,
)
objects = st.dictionaries(texts, json_values, max_size=3)
numbers = st.floats(allow_nan=False, allow_infinity=False)
counts = st.integers(0, 2**31 - 1)


def fields(required: dict[str, Any], optional: dict[str, Any]) -> st.SearchStrategy[Json]:
    """Objects with some of the `optional` fields, and one or the other that no contract knows."""
    known = st.fixed_dictionaries(required, optional=optional)
    further = st.dictionaries(texts.filter(lambda name: name not in required | optional), json_values, max_size=2)
    return st.builds(lambda said, more: more | said, known, further)


spans = fields({"version": st.integers(0, 99).map(str), "start": counts, "end": counts}, {})
shown_images = fields({"media": st.just(f"sha256:{'0a' * 32}"), "start": counts, "end": counts}, {})
messages = fields(
    {
        "role": st.sampled_from(["user", "assistant", "tool"]),
        "content": texts,
        "token_ids": st.lists(counts, max_size=4),
    },
    {
        "generation_logprobs": st.none() | st.lists(st.floats(-9, 0, width=32), max_size=4),
        "finish_reason": st.sampled_from([None, "stop", "length"]),
        "weight_versions": st.none() | st.lists(spans, max_size=2),
        "mm_ranges": st.none() | st.lists(shown_images, max_size=2),
        "reward": st.none() | numbers,
        "name": st.none() | texts,
        "tool_call_id": st.none() | texts,
        "tool_calls": st.none() | st.lists(objects, max_size=2),
        "reasoning_content": st.none() | texts,
        "parsed_content": st.none() | texts,
        "parse_error": st.none() | texts,
    },
)
ROWS: dict[str, tuple[NumberType, list[int]]] = {
    "routed_experts": ("uint8", [2, 2]),
    "top_token_ids": ("int32", [3]),
    "top_logprobs": ("float32", [3]),
    "sampling_mask": ("int32", []),
    "sampling_mask_sizes": ("uint16", []),
    "entropy": ("float32", []),
}


def packed(name: str, rows: int, byte: int) -> Json:
    dtype, row = ROWS[name]
    data = bytes([byte % 127]) * (rows * math.prod(row) * NUMBER_BYTES[dtype])
    return {"dtype": dtype, "shape": [rows, *row], "data": base64.b64encode(data).decode()}


messages_with_columns = st.builds(
    lambda message, columns: message | {name: packed(name, *given) for name, given in columns.items()},
    messages,
    st.dictionaries(st.sampled_from(sorted(ROWS)), st.tuples(st.integers(0, 4), st.integers(0, 255)), max_size=6),
)
metrics = fields(
    {
        "turn_count": counts,
        "total_tokens": counts,
        "assistant_tokens": counts,
        "env_tokens": counts,
        "terminated": st.booleans(),
        "truncated": st.booleans(),
        "max_turns_reached": st.booleans(),
        "total_reward": st.none() | numbers,
        "turn_gen_tokens": st.lists(counts, max_size=2),
    },
    {"turn_input_tokens": st.lists(counts, max_size=2), "parse_errors": counts, "clipped_turns": counts},
)
errors = fields({"kind": st.just("timeout"), "message": texts, "retryable": st.booleans()}, {})
results = fields(
    {
        "idx": st.integers(-(2**63), 2**63 - 1),
        "generation_index": counts,
        "task_name": texts,
        "message_log": st.lists(messages | messages_with_columns, max_size=3),
        "total_reward": st.none() | numbers,
        "rewards": st.dictionaries(texts, numbers, max_size=2),
        "status": st.sampled_from(["completed", "error", "deadline"]),
        "terminated": st.booleans(),
        "truncated": st.booleans(),
        "max_turns_reached": st.booleans(),
        "extra_env_info": objects,
        "metrics": metrics,
    },
    {
        "id": st.none() | texts,
        "error": st.none() | errors,
        "stop_strings": st.lists(texts, max_size=2),
        "observation_format": st.sampled_from(["chat", "raw"]),
        "tools": st.none() | st.lists(objects, max_size=2),
        "chat_template_kwargs": st.none() | objects,
        "answer": st.none() | texts,
        "further_fields": json_values,
    },
).map(SampleResult.model_validate)


def arrow_body(samples: list[SampleResult], order: list[int] | None = None, **summary: Any) -> bytes:
    answer = ArrowResponseEncoder()
    for position in order or range(len(samples)):
        answer.add(position, samples[position])
    return b"".join(answer.body(RolloutSummary(**SUMMARY | summary)))


def json_body(samples: list[SampleResult]) -> bytes:
    answer = JsonResponseEncoder()
    for position, sample in enumerate(samples):
        answer.add(position, sample)
    return b"".join(answer.body(RolloutSummary(**SUMMARY)))


def as_json(samples: list[SampleResult]) -> RolloutResponse:
    return RolloutResponse.model_validate_json(json_body(samples))


def as_arrow(samples: list[SampleResult]) -> ArrowResponse:
    return read_response(arrow_body(samples))


def plain(idx: int = 0, **said: Any) -> SampleResult:
    return SampleResult.model_validate(result(idx, **said))


# The same as JSON


@given(st.lists(results, max_size=4))
def test_either_encoding_gives_the_same_response_to_the_last_null(samples: list[SampleResult]) -> None:
    by_json, by_arrow = as_json(samples), as_arrow(samples).to_response()
    assert by_arrow == by_json
    assert by_arrow.model_dump(exclude_unset=True) == by_json.model_dump(exclude_unset=True)


@given(st.lists(results, max_size=4))
def test_json_says_what_pydantic_would_say(samples: list[SampleResult]) -> None:
    response = RolloutResponse(**SUMMARY, samples=samples)
    assert as_json(samples).model_dump(exclude_unset=True) == response.model_dump(exclude_unset=True)


def test_columns_of_other_forms_than_the_first_come_back_as_well() -> None:
    """A posted log may hold those of another model, or other numbers of likely tokens."""

    def with_experts(dtype: NumberType, row: list[int]) -> SampleResult:
        experts = packed_rows([200] * 2 * math.prod(row), dtype, row)
        return plain(message_log=[Message(role="user", content="A", token_ids=[1, 2], routed_experts=experts)])

    samples = [with_experts("uint8", [2, 2]), with_experts("uint8", [4, 1]), with_experts("uint16", [1, 2])]
    assert as_arrow(samples).samples == as_json(samples).samples == samples


def test_rollouts_come_in_input_order_whatever_the_order_they_ended_in_and_however_many_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("service.rollout_requests.arrow_encoder.ROWS_PER_STEP", 3)
    monkeypatch.setattr("service.rollout_requests.arrow_encoder.ROWS_PER_BATCH", 4)
    monkeypatch.setattr("service.rollout_requests.arrow_encoder.NUMBERS_PER_BATCH", 28)
    samples = [plain(idx, content=f"text {idx}") for idx in range(10)]
    response = read_response(arrow_body(samples, order=[9, 0, 5, 3, 1, 8, 2, 7, 6, 4]))
    assert response.samples == samples
    assert [len(batch) for batch in response.tokens.to_batches()] == [2] * 5


def test_numbers_that_were_sent_are_held_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrow_encoder, "NUMBERS_PER_BATCH", 1)
    encoder = ArrowResponseEncoder()
    for position in range(3):
        encoder.add(position, plain(position, message_log=[Message(role="user", content="A", token_ids=[1])]))
    held = [len(encoder._numbers) for _ in encoder.body(RolloutSummary(**SUMMARY))]
    # Two parts of the texts, the schema of the numbers, one part for each rollout, and the end.
    assert held == [3, 3, 3, 2, 1, 0, 0]


def batches_of_texts(body: bytes) -> list[pa.RecordBatch]:
    """The batches of the first stream."""
    return list(pa.ipc.open_stream(pa.BufferReader(body)))


def test_the_text_of_an_answer_comes_in_batches_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """No array holds more than a batch: an array of strings has room for 2 GiB, and an answer may have more."""
    samples = [plain(idx=place, answer=str(place) * 1000) for place in range(10)]
    order = [7, 0, 1, 2, 9, 3, 8, 4, 5, 6]
    monkeypatch.setattr(arrow_encoder, "CHARACTERS_PER_STEP", 1)
    monkeypatch.setattr(arrow_encoder, "BYTES_PER_BATCH", 3500)
    batches = batches_of_texts(arrow_body(samples, order))
    assert [batch.num_rows for batch in batches] == [3, 3, 3, 1]
    assert [row for batch in batches for row in batch["idx"].to_pylist()] == list(range(10))
    assert read_response(arrow_body(samples, order)).samples == samples
    monkeypatch.setattr(arrow_encoder, "BYTES_PER_BATCH", 2**22)
    monkeypatch.setattr(arrow_encoder, "ROWS_PER_BATCH", 4)
    assert [batch.num_rows for batch in batches_of_texts(arrow_body(samples, order))] == [4, 4, 2]


@pytest.mark.parametrize(
    ("rows", "characters", "echoed_bytes", "steps"),
    [(64, 2**18, 0, 1), (64, 400, 0, 3), (64, 10_000, 5000, 3), (2, 2**18, 0, 3)],
)
def test_rollouts_become_columns_when_they_are_many_or_have_enough_text(
    rows: int, characters: int, echoed_bytes: int, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []

    def noted(rows: Sequence[Any], schema: pa.Schema) -> pa.RecordBatch:
        made.append(len(rows))
        return record_batch(rows, schema)

    monkeypatch.setattr(arrow_encoder, "ROWS_PER_STEP", rows)
    monkeypatch.setattr(arrow_encoder, "CHARACTERS_PER_STEP", characters)
    monkeypatch.setattr(arrow_encoder, "record_batch", noted)
    encoder = ArrowResponseEncoder(echoed_bytes)
    message = Message(role="user", content="a" * (200 - CHARACTERS_PER_MESSAGE), token_ids=[1])
    for place in range(6):
        encoder.add(place, plain(idx=place, message_log=[message]))
    list(encoder.body(RolloutSummary(request_id="r", metrics={}, policy=PolicyVersions())))
    assert made == [6 // steps] * steps


def test_the_service_answers_the_same_in_either_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    service = ScriptedHttp(RequestLimits())
    service.generator.script = ["A", GenerationRejected("no"), "B\u2028\u00e9"]
    observation = StepOutcome({"role": "user", "content": ""}, {"form": 0.5, "sum": 1.0}, terminated=True)
    service.environments["math"].script = [observation]
    samples: list[Json] = [
        {**SAMPLE, "id": "first"},
        SAMPLE,
        {**SAMPLE, "idx": 7, "nested": {"null": None, "deep": [1, {}]}},
    ]
    monkeypatch.setattr("service.rollout_requests.episodes.uuid4", lambda: UUID(int=7))
    by_json = service.call(lambda client: client.rollout(samples, num_generations=2, request_id="r"))
    by_arrow = service.call(lambda client: client.rollout_arrow(samples, num_generations=2, request_id="r"))
    assert [sample.status for sample in by_json.samples].count("error") == 2
    assert by_arrow.samples == by_json.samples
    assert (by_arrow.metrics, by_arrow.policy) == (by_json.metrics, by_json.policy)
    assert by_arrow.samples[0].model_dump(exclude_unset=True) == by_json.samples[0].model_dump(exclude_unset=True)


def test_a_number_of_more_than_64_bits_comes_back_in_either_encoding() -> None:
    samples = [plain(extra_env_info={"ground_truth": 2**70})]
    assert as_json(samples).samples == as_arrow(samples).samples == samples


def test_the_summary_may_say_more_than_this_client_knows() -> None:
    response = read_response(arrow_body([], further=[1, None]))
    assert response.model_dump(exclude={"next_samples_from", "groups"}) == {
        **SUMMARY,
        "further": [1, None],
        "samples": [],
    }


def test_staleness_is_that_of_the_json_answer() -> None:
    span = {"version": "3", "start": 0, "end": 2}
    message = {"role": "assistant", "content": "", "token_ids": [1, 2], "generation_logprobs": [-1.0, -2.0]}
    samples = [plain(message_log=[{**message, "weight_versions": [span]}])]
    assert staleness(as_arrow(samples), 5) == staleness(as_json(samples), 5)


# Where the numbers are


def test_token_ids_and_logprobs_are_read_where_they_arrived() -> None:
    body = arrow_body([plain(), plain(1)])
    arrived = np.frombuffer(body, np.uint8)
    tokens = read_response(body).tokens
    for name, dtype, values in (
        ("token_ids", np.int32, [1, 2, 3, 4] * 2),
        ("generation_logprobs", np.float32, [-0.25, -0.75] * 2),
    ):
        array = tokens[name].chunk(0).values.values.to_numpy()
        assert array.dtype == dtype
        assert array.tolist() == values
        assert np.shares_memory(array, arrived)


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_torch_reads_them_there_too() -> None:
    array = as_arrow([plain()]).tokens["token_ids"].chunk(0).values.values.to_numpy()
    tensor = torch.from_numpy(array)
    assert tensor.dtype == torch.int32
    assert np.shares_memory(tensor.numpy(), array)


# Tensors


def assert_same(ours: RolloutTensors, others: RolloutTensors) -> None:
    for name in RolloutTensors.__slots__:
        if name not in ("rewards", "included"):
            torch.testing.assert_close(getattr(ours, name), getattr(others, name), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(dict(ours.rewards), dict(others.rewards), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(dict(ours.included), dict(others.included), rtol=0, atol=0)


token_ids = st.lists(st.integers(0, 2**31 - 1), max_size=5)
versions = st.lists(
    st.builds(
        lambda version, start, length: {"version": version, "start": start, "end": start + length},
        st.builds(label_of, st.none() | st.just("run-b"), st.integers(0, 3)),
        st.integers(0, 4),
        st.integers(0, 4),
    ),
    max_size=2,
)
finish_reasons = st.sampled_from([None, "stop", "length"])
message_rewards = st.none() | st.floats(-9, 9)
given_messages = st.builds(
    lambda ids, reason, reward: {
        "role": "user",
        "content": "",
        "token_ids": ids,
        "finish_reason": reason,
        "reward": reward,
    },
    token_ids,
    finish_reasons,
    message_rewards,
)
generated_messages = st.builds(
    lambda ids, spans, reason, reward: {
        "role": "assistant",
        "content": "",
        "token_ids": ids,
        "generation_logprobs": [-0.125 * place for place in range(len(ids))],
        "weight_versions": spans,
        "finish_reason": reason,
        "reward": reward,
    },
    token_ids,
    versions,
    finish_reasons,
    message_rewards,
)


def with_columns(message: Json, sizes: list[int], missing: int) -> Json:
    """The message with a mask of these sizes and an entropy a token, and the experts of all tokens but the last."""
    tokens = len(message["token_ids"])
    sizes = (sizes * tokens)[:tokens]
    columns = {
        "sampling_mask": packed_rows(range(sum(sizes)), "int32"),
        "sampling_mask_sizes": packed_rows(sizes, "uint16"),
        "entropy": packed_rows(range(tokens), "float32"),
        "routed_experts": packed_rows(range(300, 300 + 4 * max(tokens - missing, 0)), "uint16", [2, 2]),
    }
    return message | {name: column.model_dump(mode="json") for name, column in columns.items()}


generated_messages |= st.builds(
    with_columns, generated_messages, st.lists(st.integers(0, 3), min_size=1, max_size=5), st.integers(0, 2)
)
trained = st.builds(
    lambda log, idx, reward, status, turns: plain(
        idx,
        message_log=log,
        total_reward=reward,
        rewards={"sum": reward},
        status=status,
        metrics=result()["metrics"] | {"turn_count": turns},
    ),
    st.lists(given_messages | generated_messages, max_size=4),
    st.integers(0, 2),
    st.floats(-9, 9),
    st.sampled_from(["completed", "truncated", "deadline", "error"]),
    st.integers(0, 4),
)


def test_selected_rollouts_stay_in_the_batches_they_came_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """One array of lists has no room for more than 2^31 numbers, and an answer may have more."""
    monkeypatch.setattr(arrow_encoder, "NUMBERS_PER_BATCH", 32)
    samples = [
        plain(place, message_log=[Message(role="user", content="", token_ids=[place] * 4)]) for place in range(7)
    ]
    column = as_arrow(samples).tokens["token_ids"]
    assert [chunk.to_pylist() for chunk in rows_at([0, 2, 3, 6], column).chunks] == [
        [[[0] * 4]],
        [[[2] * 4], [[3] * 4]],
        [],
        [[[6] * 4]],
    ]


@given(
    st.lists(trained, max_size=5),
    st.sampled_from(["left", "right"]),
    st.sampled_from(["drop", "mask"]),
    st.integers(1, 5),
    st.sampled_from(["total", "turn"]),
)
def test_tensors_of_either_answer_are_the_same(
    samples: list[SampleResult], padding_side: PaddingSide, not_final: NotFinal, multiple: int, credit: Credit
) -> None:
    of_arrow, of_list, of_json = (
        to_tensors(
            given,
            pad_token_id=9,
            padding_side=padding_side,
            pad_to_multiple_of=multiple,
            not_final=not_final,
            credit=credit,
        )
        for given in (as_arrow(samples), samples, as_json(samples))
    )
    assert_same(of_arrow, of_list)
    assert_same(of_arrow, of_json)


def test_selecting_rollouts_copies_none_of_their_text() -> None:
    """Copying it would join it to one array, which has no room for more than 2 GiB."""
    response = as_arrow([plain(place, content="text" * 2**18) for place in range(8)])
    before = pa.default_memory_pool()
    # Nothing that is in its memory may be alive at the end of the test.
    pool = pa.proxy_memory_pool(before)
    pa.set_memory_pool(pool)
    try:
        count = len(arrow_rollouts(response, idx_of).columns(range(1, 8)).message_counts)
    finally:
        pa.set_memory_pool(before)
    assert count == 7
    assert pool.max_memory() < 2**18


def test_groups_can_be_told_apart_by_what_only_the_sample_says() -> None:
    samples = [plain(note=note, total_reward=reward) for note, reward in (("a", 0.0), ("b", 4.0), ("a", 2.0))]
    tensors = to_tensors(
        as_arrow(samples),
        pad_token_id=0,
        scale_rewards=False,
        group_of=lambda sample: (sample.model_extra or {})["note"],
    )
    assert tensors.groups.tolist() == [0, 1, 0]
    assert tensors.advantages.tolist() == [-1, 0, 1]


def test_a_message_with_other_than_one_logprob_a_token_is_refused() -> None:
    message = {"role": "assistant", "content": "", "token_ids": [1, 2], "generation_logprobs": [-0.5]}
    with pytest.raises(ValueError, match="2 token_ids and 1 generation_logprobs"):
        to_tensors(as_arrow([plain(message_log=[message])]), pad_token_id=0)


# What goes wrong


@given(st.data())
def test_an_answer_that_was_cut_anywhere_is_an_error_of_the_client_and_never_half_an_answer(
    data: st.DataObject,
) -> None:
    samples = [plain(idx) for idx in range(3)]
    body = arrow_body(samples)
    cut = data.draw(st.integers(0, len(body) - 1))
    try:
        response = read_response(body[:cut])
    except RolloutError:
        return
    # Only the mark of the end is missing.
    assert response.samples == samples


@given(st.binary(max_size=64))
def test_an_answer_that_is_something_else_is_not_understood(body: bytes) -> None:
    with pytest.raises(ResponseNotUnderstood, match="not an Arrow stream"):
        read_response(body)


def test_an_answer_of_json_is_not_understood() -> None:
    with pytest.raises(ResponseNotUnderstood, match="matching versions"):
        read_response(json_body([plain()]))


@given(st.integers(0), st.integers(0, 255))
def test_a_damaged_byte_is_no_crash(place: int, value: int) -> None:
    entropy = packed_rows([0.5], "float32")
    log = [Message(role="user", content="A", token_ids=[1], entropy=entropy)]
    body = bytearray(arrow_body([plain(idx, message_log=log) for idx in range(3)]))
    body[place % len(body)] = value
    try:
        response = read_response(bytes(body))
        _ = response.samples
    except RolloutError:
        return
    assert len(response.samples) == 3


COLUMN = pa.list_(pa.list_(pa.float32()))


@pytest.mark.parametrize(
    "fields",
    [
        [pa.field("entropy", COLUMN)],
        [pa.field("entropy", COLUMN, metadata={"dtype": "float64", "shape": "[]"})],
        [pa.field("entropy", COLUMN, metadata={"dtype": "int32", "shape": "[]"})],
        [pa.field("entropy", COLUMN, metadata={"dtype": "float32", "shape": "5"})],
        [pa.field("entropy", COLUMN, metadata={"dtype": "float32", "shape": "[-1]"})],
        [pa.field("entropy", COLUMN, metadata={"dtype": "float32", "shape": "[2]"})],
        [pa.field("entropy", COLUMN, metadata={"dtype": "float32", "shape": "[" * 100_000})],
        [pa.field("entropy", pa.string(), metadata={"dtype": "float32", "shape": "[]"})],
        [pa.field("entropy", pa.list_(pa.list_(pa.bool_())), metadata={"dtype": "float32", "shape": "[]"})],
        [pa.field("entropy", COLUMN, metadata={"dtype": "float32", "shape": "[]"})] * 2,
    ],
)
def test_columns_that_are_not_what_their_metadata_say_are_not_understood(fields: list[pa.Field]) -> None:
    body = arrow_body([plain()])
    source = pa.BufferReader(body)
    pa.ipc.open_stream(source).read_all()
    tokens = body[source.tell() :]
    table = pa.ipc.open_stream(tokens).read_all()
    schema = pa.schema([*table.schema, *fields])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        given: dict[bool, list[Any]] = {True: ["a"], False: [[None, []]]}
        values = [pa.array(given[field.type == pa.string()], field.type) for field in fields]
        columns = [column.combine_chunks() for column in table.columns]
        writer.write_batch(pa.RecordBatch.from_arrays([*columns, *values], schema=schema))
    with pytest.raises(ResponseNotUnderstood, match="other columns than this client knows"):
        read_response(body[: -len(tokens)] + sink.getvalue().to_pybytes())


def test_tokens_of_other_messages_than_the_logs_are_not_understood() -> None:
    one, other = arrow_body([plain()]), arrow_body([plain(message_log=[])])
    second = [body.index(b"\xff\xff\xff\xff\x00\x00\x00\x00") + 8 for body in (one, other)]
    with pytest.raises(ResponseNotUnderstood, match="tokens of other messages"):
        read_response(one[: second[0]] + other[second[1] :])


def test_an_invalid_request_is_a_problem_document_whatever_the_answer_was_to_be() -> None:
    answer = ScriptedHttp().post({"samples": []}, accept=ARROW)
    assert (answer.status_code, answer.headers["content-type"]) == (422, "application/problem+json")


def test_a_sample_that_fails_a_request_is_a_problem_document_too() -> None:
    service = ScriptedHttp()
    service.generator.script = [GenerationRejected("The engine refused the generation: no.")]
    answer = service.post({"samples": [SAMPLE], "on_error": "fail"}, accept=ARROW)
    assert (answer.status_code, answer.headers["content-type"]) == (502, "application/problem+json")


@pytest.mark.slow
def test_an_answer_is_read_where_nothing_else_has_imported_pyarrow(tmp_path: Path) -> None:
    body = tmp_path / "body"
    body.write_bytes(arrow_body([plain()]))
    program = (
        "import pathlib, sys\n"
        "from rollout_client.calls.arrow_bodies import read_response\n"
        "sys.exit(str(len(read_response(pathlib.Path(sys.argv[1]).read_bytes()).samples)))"
    )
    ended = subprocess.run([sys.executable, "-c", program, body], check=False, capture_output=True, text=True)
    assert ended.stderr.strip() == "1"


@pytest.mark.slow
def test_without_pyarrow_the_client_works_and_says_what_brings_it() -> None:
    program = (
        "import sys; sys.modules['pyarrow'] = None\n"
        "from rollout_client import RolloutClient\n"
        "import rollout_client.tensors\n"
        "try: RolloutClient('http://127.0.0.1:9').rollout_arrow([])\n"
        "except ModuleNotFoundError as error: sys.exit(str(error))"
    )
    ended = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)
    assert ended.stderr.strip() == 'Arrow needs pyarrow: pip install "rollout-client[arrow]"'


def test_a_process_that_has_imported_nothing_else_reads_an_answer_and_makes_tensors_of_it() -> None:
    program = (
        "import sys\n"
        "from rollout_client.calls.arrow_bodies import read_response\n"
        "response = read_response(sys.stdin.buffer.read())\n"
        "from rollout_client.tensors import to_tensors\n"
        "print(response.samples[0].idx, to_tensors(response, pad_token_id=0).lengths.tolist())"
    )
    message = {"role": "user", "content": "A", "token_ids": [1, 2]}
    answer = arrow_body([plain(7, message_log=[message])])
    ended = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, input=answer)
    assert ended.stdout.decode().split() == ["7", "[2]"]
