"""Values of callers as JSON: numbers of numpy and torch are numbers, what JSON does not have is named."""

import json
from collections import deque
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout_client import AsyncRolloutClient, SampleInput
from rollout_client.calls.json_values import json_bytes, json_value
from rollout_client.errors import NotJson
from tests.clients.client_calls import call, play
from tests.clients.scripted_service import Json, ScriptedService, sample

CIRCLE: list[Any] = [1]
CIRCLE.append(CIRCLE)
HANDLE = object()
NOBODY = "http://127.0.0.1:1"
"""Nothing listens there: a request that was sent would fail otherwise."""


def in_numpy_or_torch(value: Any, draw: Callable[[int], int]) -> Any:
    """`value` with each number, and each list of numbers, in one of the forms that it may have."""
    if isinstance(value, dict):
        return {name: in_numpy_or_torch(inner, draw) for name, inner in value.items()}
    if isinstance(value, list):
        kinds = {type(item) for item in value}
        if len(kinds) == 1 and kinds <= {bool, int, float}:
            return one_of([np.array, torch.tensor, tuple, list], draw)(value)
        inner = [in_numpy_or_torch(item, draw) for item in value]
        return one_of([list, tuple, objects], draw)(inner)
    if type(value) in {bool, int, float}:
        scalar = {bool: np.bool_, int: np.int64, float: np.float64}[type(value)]
        return one_of([scalar, np.array, torch.tensor, type(value)], draw)(value)
    return value


def one_of(forms: list[Callable[[Any], Any]], draw: Callable[[int], int]) -> Callable[[Any], Any]:
    return forms[draw(len(forms))]


def objects(values: list[Any]) -> Any:
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column


NUMBERS = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(width=32, allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none() | NUMBERS | st.text(st.characters(codec="utf-8"), max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
)


@given(VALUES, st.data())
def test_numbers_arrays_and_tensors_are_sent_as_numbers_and_lists(value: Any, data: st.DataObject) -> None:
    disguised = in_numpy_or_torch(value, lambda below: data.draw(st.integers(0, below - 1)))
    assert json.loads(json_bytes(disguised)) == value
    assert json_value(disguised) == value


@pytest.mark.parametrize(
    ("value", "sent"),
    [
        (np.float32(0.5), 0.5),
        (np.uint8(255), 255),
        (torch.tensor(0.5, dtype=torch.bfloat16), 0.5),
        (torch.tensor([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        (torch.tensor([0.25], requires_grad=True), [0.25]),
        (np.array(["a", "b"]), ["a", "b"]),
        ({np.int64(3): 1}, {"3": 1}),
        (datetime(2026, 1, 1, tzinfo=UTC), "2026-01-01T00:00:00Z"),
    ],
    ids=str,
)
def test_other_forms_of_numbers_and_what_pydantic_knows_are_sent_too(value: Any, sent: Any) -> None:
    assert json.loads(json_bytes(value)) == json_value(value) == sent


REFUSED: list[tuple[Any, str, str]] = [
    ({"handle": HANDLE}, ".handle", "object"),
    ({"grid": [{"ok": np.int64(1)}, {"cells": [1, HANDLE]}]}, ".grid[1].cells[1]", "object"),
    ({"column": objects([1, {"handle": HANDLE}])}, ".column[1].handle", "object"),
    ({"wave": np.array([1j])}, ".wave", "ndarray"),
    ({"day": np.datetime64("2026-01-01")}, ".day", "datetime64"),
    ({"long": np.longdouble(1)}, ".long", "longdouble"),
    ({"sparse": torch.eye(2).to_sparse()}, ".sparse", "Tensor"),
    ({"queue": deque([HANDLE])}, ".queue", "deque"),
    ({"half": "\ud800"}, ".half", "str"),
    ({"bytes": b"\xff"}, ".bytes", "bytes"),
    ({"circle": CIRCLE}, ".circle[1]", "list"),
    ({HANDLE: 1}, "", "dict"),
]


@pytest.mark.parametrize(("info", "place", "kind"), REFUSED, ids=[kind + place for _, place, kind in REFUSED])
def test_what_json_does_not_have_is_named_by_its_sample_and_field(info: Json, place: str, kind: str) -> None:
    with pytest.raises(NotJson) as refused:
        json_bytes({"samples": [sample(), sample(extra_env_info=info)]})
    field = f"samples[1].extra_env_info{place}"
    assert (refused.value.field, refused.value.sample) == (field, 1)
    assert str(refused.value).startswith(f"{field}: a value of type {kind} cannot be sent as JSON (got ")


def test_every_field_of_a_request_takes_numbers_of_numpy_and_torch(service: ScriptedService) -> None:
    log = [{"role": "user", "content": "", "token_ids": np.array([1, 2])}]
    given: list[Json] = [
        {"task_name": "math", "message_log": log, "idx": np.int64(7), "seed": torch.tensor(3)},
        {"task_name": "math", "message_log": [{**log[0], "token_ids": list(torch.tensor([1, 2]))}]},
        sample(extra_env_info={"n": np.float32(0.5), "grid": np.eye(2, dtype=int)}, further=np.bool_(True)),
    ]
    options: Json = {"sampling": {"seed": np.int64(5), "temperature": np.float32(0.5)}, "max_seq_len": np.int32(64)}
    play(service.url, *given, num_generations=torch.tensor(2), **options)
    sent_log = [{"role": "user", "content": "", "token_ids": [1, 2]}]
    sent = {
        "samples": [
            {"task_name": "math", "message_log": sent_log, "idx": 7, "seed": 3},
            {"task_name": "math", "message_log": sent_log},
            sample(extra_env_info={"n": 0.5, "grid": [[1, 0], [0, 1]]}, further=True),
        ],
        "num_generations": 2,
        "sampling": {"seed": 5, "temperature": 0.5},
        "max_seq_len": 64,
    }
    assert service.bodies == [sent]


def test_a_typed_sample_may_hold_such_numbers_in_its_further_fields(service: ScriptedService) -> None:
    play(service.url, SampleInput(**sample(level=np.int64(3))))
    assert service.bodies == [{"samples": [sample(level=3)]}]


def test_a_bar_counts_the_rollouts_of_such_a_group(service: ScriptedService) -> None:
    answer = play(service.url, sample(), progress=True, num_generations=np.int64(2))
    assert [played.generation_index for played in answer.samples] == [0, 1]


REQUESTS: dict[str, Callable[[AsyncRolloutClient, Any], Awaitable[Any]]] = {
    "samples[1].handle": lambda client, bad: client.rollout([sample(), sample(handle=bad)]),
    "sampling.seed": lambda client, bad: client.rollout_arrow([sample()], sampling={"seed": bad}),
    "sample.extra_env_info.handle": lambda client, bad: opened(client, sample=sample(extra_env_info={"handle": bad})),
    "sequences[1][2]": lambda client, bad: client.score([[1], [1, 2, bad]]),
    "logprobs[0][1]": lambda client, bad: client.report_logprobs(["a"], [[0.5, bad]]),
}


SAMPLES = {"samples[1].handle": 1, "samples[0].idx": 0}
"""The sample of a field; a value outside of the samples has none."""


async def opened(client: AsyncRolloutClient, **request: Any) -> None:
    async with client.sessions.open(**request):
        raise AssertionError("It was opened.")


@pytest.mark.parametrize("field", REQUESTS)
def test_what_json_does_not_have_is_refused_before_anything_is_sent(field: str) -> None:
    with pytest.raises(NotJson) as refused:
        call(NOBODY, lambda client: REQUESTS[field](client, HANDLE), retries=0)
    assert (refused.value.field, refused.value.sample) == (field, SAMPLES.get(field))
