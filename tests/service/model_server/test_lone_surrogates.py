"""Bodies with half a surrogate pair are refused before an engine gets them, and no others."""

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from service.model_server.call_bodies import refuse_lone_surrogates
from service.problems import RequestProblem

PIECES = st.sampled_from(["\\", "ud800", "uDC00", "x", '"', "\ud800", "\udbff", "\udc00", "\udfff", "\U0001f600"])
ANY_TEXT = st.text(st.characters(codec=None, categories=None), max_size=8) | st.lists(PIECES, max_size=6).map("".join)


def is_refused(body: bytes) -> bool:
    try:
        refuse_lone_surrogates(body)
    except RequestProblem:
        return True
    return False


@example("\\ud800", True, "utf-8")
@given(ANY_TEXT, st.booleans(), st.sampled_from(["utf-8", "utf-16", "utf-16-be", "utf-32", "utf-32-le"]))
def test_what_is_refused_is_what_cannot_be_encoded_after_python_has_parsed_it(
    text: str, is_ascii: bool, encoding: str
) -> None:
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
    refuse_lone_surrogates(body)


def test_the_refusal_says_what_to_do() -> None:
    with pytest.raises(RequestProblem) as refused:
        refuse_lone_surrogates(b'{"stop": "\\ud800"}')
    assert refused.value.problem.status == 422
    [error] = refused.value.problem.errors
    assert error.field == "stop"
    assert (
        error.message
        == "a text has half a surrogate pair, such as \\ud800 alone, which is not a character; leave it out"
    )


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b'{"a": "x", "messages": [{"role": "user", "content" : ["\\ud800"]}], "stop": "y"}', "content"),
        (b'{"stop": ["a", "\\udc00"]}', "stop"),
        (b'["\\ud800"]', "body"),
        (b'{"\\ud800": 1}', "body"),
        (b'{"a": {"\\ud800": 1}}', "a"),
        (b'{"stop": "' + b"x" * 5000 + b'\\ud800"}', "body"),
    ],
)
def test_the_refusal_names_the_nearest_field_before_it(body: bytes, field: str) -> None:
    with pytest.raises(RequestProblem) as refused:
        refuse_lone_surrogates(body)
    assert [error.field for error in refused.value.problem.errors] == [field]
