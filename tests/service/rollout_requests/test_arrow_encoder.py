"""An answer as Arrow: the same as the JSON answer, its numbers where they arrived, and never half of it."""

import base64
import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from deployments.protocols.token_columns import packed_rows
from rollout_client import RolloutError, RolloutResponse, SampleResult
from rollout_client.calls.arrow_bodies import ArrowResponse, read_response
from rollout_client.contract.base import label_of
from rollout_client.contract.messages import NUMBER_BYTES, Message, NumberType, SampledWith
from rollout_client.contract.rollouts import RolloutSummary
from rollout_client.errors import ResponseNotUnderstood
from rollout_client.tensors import Credit, NotFinal, PaddingSide, RolloutTensors, to_tensors
from rollout_client.tensors.arrow_rollouts import rows_at
from service.rollout_requests import arrow_encoder
from service.rollout_requests.arrow_encoder import ArrowResponseEncoder
from service.rollout_requests.result_encoding import JsonResponseEncoder
from tests.clients.scripted_service import SUMMARY, result
from tests.drawn_models import Json, drawn

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


GIVEN: dict[str, st.SearchStrategy[Any]] = {
    "idx": st.integers(-(2**63), 2**63 - 1),
    "version": st.integers(0, 99).map(str),
    "media": st.just(f"sha256:{'0a' * 32}"),
    "temperature": st.floats(0, 2),
    # In Arrow its defaults are said.
    "sampled_with": st.none() | st.floats(0, 2).map(lambda drawn: SampledWith(temperature=drawn).model_dump()),
    "generation_logprobs": st.none() | st.lists(st.floats(-9, 0, width=32), max_size=4),
    **{name: st.builds(packed, st.just(name), st.integers(0, 4), st.integers(0, 255)) for name in ROWS},
}
results = drawn(SampleResult, GIVEN).map(SampleResult.model_validate)
SAID_WHOLE = {"branches", "replay"}
"""In Arrow, the defaults of their parts are said."""


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


@given(st.lists(results, max_size=2))
def test_either_encoding_gives_the_response_of_pydantic_to_the_last_null(samples: list[SampleResult]) -> None:
    response = RolloutResponse(**SUMMARY, samples=samples)
    by_json, by_arrow = as_json(samples), as_arrow(samples).to_response()
    assert by_json.model_dump(exclude_unset=True) == response.model_dump(exclude_unset=True)
    assert by_arrow == by_json
    alike: dict[str, Any] = {"exclude_unset": True, "exclude": {"samples": {"__all__": SAID_WHOLE}}}
    assert by_arrow.model_dump(**alike) == by_json.model_dump(**alike)


def test_columns_of_other_forms_than_the_first_come_back_as_well() -> None:
    """A posted log may hold those of another model, or other numbers of likely tokens."""

    def with_experts(dtype: NumberType, row: list[int]) -> SampleResult:
        experts = packed_rows([200] * 2 * math.prod(row), dtype, row)
        return plain(message_log=[Message(role="user", content="A", token_ids=[1, 2], routed_experts=experts)])

    samples = [with_experts("uint8", [2, 2]), with_experts("uint8", [4, 1]), with_experts("uint16", [1, 2])]
    assert as_arrow(samples).samples == as_json(samples).samples == samples


def test_rollouts_come_in_input_order_in_however_many_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.rollout_requests.arrow_encoder.ROWS_PER_STEP", 3)
    monkeypatch.setattr("service.rollout_requests.arrow_encoder.ROWS_PER_BATCH", 4)
    monkeypatch.setattr("service.rollout_requests.arrow_encoder.NUMBERS_PER_BATCH", 28)
    samples = [plain(idx, content=f"text {idx}") for idx in range(10)]
    response = read_response(arrow_body(samples, order=[9, 0, 5, 3, 1, 8, 2, 7, 6, 4]))
    assert response.samples == samples
    assert [len(batch) for batch in response.tokens.to_batches()] == [2] * 5


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


def test_a_number_of_more_than_64_bits_comes_back_in_either_encoding() -> None:
    samples = [plain(extra_env_info={"ground_truth": 2**70})]
    assert as_json(samples).samples == as_arrow(samples).samples == samples


def test_the_summary_may_say_more_than_this_client_knows() -> None:
    read = read_response(arrow_body([], further=[1, None]))
    dumped = read.model_dump(exclude={"next_samples_from", "groups", "certificates"})
    assert dumped == {**SUMMARY, "further": [1, None], "samples": []}


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


# Tensors


def assert_same(ours: RolloutTensors, others: RolloutTensors) -> None:
    for name in RolloutTensors.__slots__:
        one, other = getattr(ours, name), getattr(others, name)
        if isinstance(one, torch.Tensor):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
        elif name not in ("rewards", "included"):
            assert one == other
    torch.testing.assert_close(dict(ours.rewards), dict(others.rewards), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(dict(ours.included), dict(others.included), rtol=0, atol=0)


versions = st.lists(
    st.builds(
        lambda version, start, length: {"version": version, "start": start, "end": start + length},
        st.builds(label_of, st.none() | st.just("run-b"), st.integers(0, 3)),
        st.integers(0, 4),
        st.integers(0, 4),
    ),
    max_size=2,
)


def with_columns(message: Json, sizes: list[int], missing: int) -> Json:
    """A generated message with a mask of these sizes and an entropy a token, and the experts of all but the last."""
    if message["role"] != "assistant":
        return message
    tokens = len(message["token_ids"])
    sizes = (sizes * tokens)[:tokens]
    columns = {
        "sampling_mask": packed_rows(range(sum(sizes)), "int32"),
        "sampling_mask_sizes": packed_rows(sizes, "uint16"),
        "entropy": packed_rows(range(tokens), "float32"),
        "routed_experts": packed_rows(range(300, 300 + 4 * max(tokens - missing, 0)), "uint16", [2, 2]),
    }
    logprobs = [-0.125 * place for place in range(tokens)]
    packed_columns = {name: column.model_dump(mode="json") for name, column in columns.items() if sizes[:1] != [0]}
    return message | packed_columns | {"generation_logprobs": logprobs}


SMALL: dict[str, st.SearchStrategy[Any]] = {
    "weight_versions": versions,
    "reward": st.none() | st.floats(-9, 9),
    "generation_logprobs": st.none(),
    "mm_ranges": st.none(),
    "sampled_with": st.none(),
    **{name: st.none() for name in ROWS},
}
messages = st.builds(
    with_columns, drawn(Message, SMALL), st.lists(st.integers(0, 3), min_size=1, max_size=5), st.integers(0, 2)
)
TRAINED: dict[str, st.SearchStrategy[Any]] = {
    "message_log": st.lists(messages, max_size=3),
    "idx": st.integers(0, 2),
    "total_reward": st.floats(-9, 9),
    "rewards": st.fixed_dictionaries({"sum": st.floats(-9, 9)}),
    "branches": st.just([]),
    "replay": st.none(),
}
trained = drawn(SampleResult, TRAINED).map(SampleResult.model_validate)


def test_selected_rollouts_stay_in_the_batches_they_came_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """One array of lists has no room for more than 2^31 numbers, and an answer may have more."""
    monkeypatch.setattr(arrow_encoder, "NUMBERS_PER_BATCH", 32)
    samples = [plain(at, message_log=[Message(role="user", content="", token_ids=[at] * 4)]) for at in range(7)]
    assert [chunk.to_pylist() for chunk in rows_at([0, 2, 3, 6], as_arrow(samples).tokens["token_ids"]).chunks] == [
        [[[0] * 4]],
        [[[2] * 4], [[3] * 4]],
        [],
        [[[6] * 4]],
    ]


@given(
    st.lists(trained, max_size=3),
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


def test_a_message_with_other_than_one_logprob_a_token_is_refused() -> None:
    message = {"role": "assistant", "content": "", "token_ids": [1, 2], "generation_logprobs": [-0.5]}
    with pytest.raises(ValueError, match="2 token_ids and 1 generation_logprobs"):
        to_tensors(as_arrow([plain(message_log=[message])]), pad_token_id=0)


# What goes wrong


@given(st.data())
def test_an_answer_that_was_cut_anywhere_is_an_error_and_never_half(data: st.DataObject) -> None:
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
@example(json_body([plain()]))
def test_an_answer_that_is_something_else_is_not_understood(body: bytes) -> None:
    with pytest.raises(ResponseNotUnderstood, match="not an Arrow stream"):
        read_response(body)


@given(st.integers(0), st.integers(0, 255))
def test_a_damaged_byte_is_no_crash(place: int, value: int) -> None:
    log = [Message(role="user", content="A", token_ids=[1], entropy=packed_rows([0.5], "float32"))]
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
        [pa.field("entropy", COLUMN, metadata={"dtype": "float32", "shape": "5"})],
        [pa.field("entropy", COLUMN, metadata={"dtype": "float32", "shape": "[-1]"})],
        [pa.field("entropy", COLUMN, metadata={"dtype": "float32", "shape": "[" * 100_000})],
        [pa.field("entropy", pa.string(), metadata={"dtype": "float32", "shape": "[]"})],
        [pa.field("entropy", pa.list_(pa.list_(pa.bool_())), metadata={"dtype": "float32", "shape": "[]"})],
        [pa.field("entropy", COLUMN, metadata={"dtype": "float32", "shape": "[]"})] * 2,
    ],
)
def test_columns_that_contradict_their_metadata_are_not_understood(fields: list[pa.Field]) -> None:
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
