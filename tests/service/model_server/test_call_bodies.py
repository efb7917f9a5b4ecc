"""Bodies of calls: half a surrogate pair is refused, and the number of answers is read as vLLM reads it."""

import asyncio
import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from deployments.protocols.model_server import Endpoint
from service.model_server.call_bodies import _parsed, choices_of, fields_of
from service.problems import RequestProblem

PIECES = st.sampled_from(["\\", "ud800", "uDC00", "x", '"', "\ud800", "\udbff", "\udc00", "\udfff", "\U0001f600"])
ANY_TEXT = st.text(st.characters(codec=None, categories=None), max_size=8) | st.lists(PIECES, max_size=6).map("".join)


def read(body: bytes) -> dict[str, Any]:
    return asyncio.run(fields_of(body))


def is_refused(body: bytes) -> bool:
    try:
        read(body)
    except RequestProblem as refused:
        return [(refused.problem.status, error.field) for error in refused.problem.errors] == [(422, "body")]
    return False


@example("\\ud800", True, "utf-8")
@given(ANY_TEXT, st.booleans(), st.sampled_from(["utf-8", "utf-16", "utf-16-be", "utf-32", "utf-32-le"]))
def test_what_cannot_be_encoded_after_parsing_is_refused(text: str, is_ascii: bool, encoding: str) -> None:
    body = json.dumps({"stop": [text]}, ensure_ascii=is_ascii).encode(encoding, "surrogatepass")
    try:
        json.dumps(json.loads(body), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        expected = True
    else:
        expected = False
    assert is_refused(body) is expected


@pytest.mark.parametrize("body", [b"", b"\x00", b"\xff\xfe\x00", b'{"a": "\\'])
def test_what_is_no_json_is_left_to_the_parser(body: bytes) -> None:
    assert _parsed(body) == {}


@pytest.mark.parametrize("body", [b'["\\ud800"]', b'{"\\ud800": 1}', b'{"n": ["", "\\udc00"]}'])
def test_half_a_pair_is_refused_wherever_it_stands(body: bytes) -> None:
    assert is_refused(body)


def asked_choices(endpoint: Endpoint, body: bytes, most: int) -> int:
    return choices_of(endpoint, read(body), most)


@pytest.mark.parametrize(
    ("body", "choices"),
    [
        (b'{"messages": [], "n": 5}', 5),
        (b'{"n" : "5"}', 5),
        (b'{"n": 5.0}', 5),
        (b'{"\\u006e": 5}', 5),
        (b'{"\\u006E": 5}', 5),
        (b'{"n": 1, "n": 5}', 5),
        (b'{"n": 5, "text": "\\ud83d\\ude00", "x": NaN}', 5),
        ('{"n": 5}'.encode("utf-16"), 5),
        ('{"n": 5}'.encode("utf-32-be"), 5),
        (b"\xef\xbb\xbf" + b'{"n": 5}', 5),
        (b'{"messages": []}', 1),
        (b'{"n": null}', 1),
        (b'{"messages": [{"n": 5}]}', 1),
        # vLLM refuses these.
        (b'{"n": -3}', 1),
        (b'{"n": "many"}', 1),
        (b'{"n": 5', 1),
        (b'["n"]', 1),
    ],
)
def test_what_n_says_is_read_however_it_is_written(body: bytes, choices: int) -> None:
    assert asked_choices("chat/completions", body, most=100) == choices


def test_a_body_that_is_nested_too_deeply_is_refused() -> None:
    with pytest.raises(RequestProblem) as refused:
        read(b'{"n": ' + b"[" * 100_000)
    assert [error.message for error in refused.value.problem.errors] == ["it is nested too deeply"]


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("one", 1),
        (["one"], 1),
        (["one", "two", "three"], 3),
        ([5, 6, 7], 1),
        ([True, 6], 1),
        ([[5, 6], [7]], 2),
        ([], 1),
        (None, 1),
        ({"a": 1}, 1),
    ],
)
def test_a_text_completion_has_the_choices_of_each_of_its_prompts(prompt: Any, prompts: int) -> None:
    assert asked_choices("completions", json.dumps({"prompt": prompt}).encode(), most=100) == prompts
    assert asked_choices("completions", json.dumps({"prompt": prompt, "n": 4}).encode(), most=100) == 4 * prompts


@pytest.mark.parametrize(
    ("endpoint", "body", "asked"),
    [
        ("chat/completions", {"n": 101}, 101),
        ("chat/completions", {"n": 10**30}, 10**30),
        ("completions", {"prompt": [[5]] * 60, "n": 2}, 120),
    ],
)
def test_more_than_a_request_may_play_is_refused(endpoint: Endpoint, body: Any, asked: int) -> None:
    with pytest.raises(RequestProblem) as raised:
        asked_choices(endpoint, json.dumps(body).encode(), most=100)
    [error] = raised.value.problem.errors
    assert (raised.value.problem.status, error.field, error.value) == (422, "n", asked)
    assert "limits.max_rollouts_per_request allows, which is 100" in error.message
