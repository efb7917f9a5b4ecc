"""Calls for a stream that wait: heartbeats, errors that come late, and callers that leave. In virtual time."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import httpx
import httpx2
import openai
import pytest

from deployments.failures import GenerationLost
from deployments.protocols.model_server import ServedPart, ServedTokens
from tests import virtual_time
from tests.fakes.model_server import ScriptedModelServer
from tests.service.scripted_http import ScriptedHttp

EVENTS = "text/event-stream; charset=utf-8"
CHUNK = b'data: {"id":"a","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"%s"}}]}\n\n'
DONE = [ServedPart(b"data: [DONE]\n\n"), ServedPart(tokens=ServedTokens(1, 2))]
BEATS = b":\n\n"
STREAM = b'{"messages": [], "stream": true}'


def answer_to(
    parts: Sequence[ServedPart | Exception | float], body: bytes = STREAM, path: str = "chat/completions"
) -> httpx.Response:
    service, headers = ScriptedHttp(model_server=ScriptedModelServer(parts)), {"content-type": "application/json"}
    return virtual_time.run(service.asked(lambda http: http.post(f"/v1/{path}", content=body, headers=headers)))


def events(data: bytes = CHUNK % b"Hi") -> list[ServedPart]:
    return [ServedPart(data, 200, EVENTS), *DONE]


def test_a_stream_has_heartbeats_whenever_it_is_silent_for_long() -> None:
    first, *rest = events()
    answer = answer_to([40.0, first, 14.0, ServedPart(CHUNK % b"!"), 31.0, *rest])
    assert (answer.status_code, answer.headers["content-type"]) == (200, EVENTS)
    # One after 15 s of silence and one after 30 s.
    assert answer.content == BEATS * 2 + CHUNK % b"Hi" + CHUNK % b"!" + BEATS * 2 + b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", b'{"messages": [{"role": "user", "content": "\\"stream\\": true"}]}'),
        ("chat/completions", b'{"stream": false}'),
        ("chat/completions", b'{"stream": tru'),
        ("messages/count_tokens", b'{"stream": true}'),
    ],
)
def test_an_answer_that_is_no_stream_has_none_however_long_it_takes(path: str, body: bytes) -> None:
    answer = answer_to([100.0, ServedPart(b"{}", 200, "application/json", ServedTokens())], body, path)
    assert (answer.headers["content-type"], answer.content) == ("application/json", b"{}")


def test_what_fails_before_a_heartbeat_was_sent_has_its_status() -> None:
    assert answer_to([14.0, GenerationLost("It is gone.")]).status_code == 503


GONE = {"type": "urn:rollout:problem:not-ready", "message": "It is gone.", "code": 503}


OF_RESPONSES = {"type": "error", "code": "503", "message": "It is gone.", "param": None, "sequence_number": 0}


@pytest.mark.parametrize(
    ("path", "event", "data"),
    [
        ("chat/completions", "", {"error": GONE}),
        ("messages", "event: error\n", {"type": "error", "error": GONE}),
        ("responses", "event: error\n", {**OF_RESPONSES, "error": GONE}),
    ],
)
@pytest.mark.parametrize(
    ("parts", "before"),
    [([20.0], BEATS), (events()[:1], CHUNK % b"Hi"), ([20.0, *events()[:1]], BEATS + CHUNK % b"Hi")],
    ids=["a heartbeat", "an event", "both"],
)
def test_what_fails_after_the_begin_ends_a_stream_with_the_apis_own_error(
    path: str, event: str, data: Any, parts: list[ServedPart | Exception | float], before: bytes
) -> None:
    answer = answer_to([*parts, GenerationLost("It is gone.")], path=path)
    assert (answer.status_code, error_after(before, answer)) == (200, (event, data))


def error_after(before: bytes, answer: httpx.Response) -> tuple[str, Any]:
    """Whatever precedes the data of the event that follows on these bytes, and the data."""
    assert answer.content.startswith(before)
    text = answer.content.removeprefix(before).decode().removesuffix("\n\ndata: [DONE]\n\n")
    event, _, error = text.partition("data: ")
    return event, json.loads(error)


@pytest.mark.parametrize(
    ("path", "last"),
    [
        ("chat/completions", b"data: [DONE]\n\n"),
        ("messages", b'event: message_stop\ndata: {"type":"message_stop"}\n\n'),
        ("responses", b'event: response.completed\ndata: {"type":"response.completed"}\n\n'),
        ("responses", b'event: response.incomplete\ndata: {"type":"response.incomplete"}\n\n'),
    ],
)
def test_a_stream_that_has_had_its_last_event_gets_no_error(path: str, last: bytes) -> None:
    whole = CHUNK % b"Hi" + last
    assert answer_to([ServedPart(whole, 200, EVENTS), GenerationLost("It is gone.")], path=path).content == whole


def test_text_that_looks_like_the_last_event_is_not_one() -> None:
    text = CHUNK % b"data: [DONE]"
    answer = answer_to([ServedPart(text, 200, EVENTS), GenerationLost("It is gone.")])
    assert error_after(text, answer) == ("", {"error": GONE})


def test_an_answer_that_is_neither_a_stream_nor_json_stays_as_it_is() -> None:
    text = "text/plain; charset=utf-8"
    answer = answer_to([ServedPart(b"Internal", 500, text), ServedPart(b" error", tokens=ServedTokens())])
    assert (answer.status_code, answer.headers["content-type"], answer.content) == (500, text, b"Internal error")


@pytest.mark.parametrize(
    ("failure", "level", "message"),
    [
        (GenerationLost("It is gone."), "WARNING", "A stream ends with an error."),
        (KeyError("/secret/path"), "ERROR", "A request failed unexpectedly."),
    ],
)
def test_a_stream_that_fails_is_logged(
    failure: Exception, level: str, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    answer = answer_to([*events()[:1], failure])
    [record] = caplog.records
    assert (record.levelname, record.getMessage(), record.exc_info and record.exc_info[1]) == (level, message, failure)
    assert record.__dict__["request_id"] == answer.headers["x-request-id"]


async def test_a_caller_that_leaves_a_stalled_stream_aborts_its_call() -> None:
    server = ScriptedModelServer(events())
    service = ScriptedHttp(model_server=server)

    messages = iter([{"type": "http.request", "body": STREAM, "more_body": False}])

    async def receive() -> dict[str, Any]:
        for message in messages:
            return message
        await forever()
        raise AssertionError("unreachable")

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            await forever()

    async def forever() -> None:
        await asyncio.Event().wait()

    scope = {
        "type": "http", "method": "POST", "path": "/v1/chat/completions", "raw_path": b"/v1/chat/completions",
        "query_string": b"", "headers": [(b"content-type", b"application/json"), (b"host", b"service")],
        "http_version": "1.1", "scheme": "http", "client": None, "server": ("service", 80), "root_path": "",
    }  # fmt: skip
    call = asyncio.create_task(service.app(scope, receive, send))
    await asyncio.sleep(1.0)
    await virtual_time.end_by_cancellation(call)
    assert server.was_left
    assert service.admission.in_flight.rollouts == 0


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (
            b'{"error": {"type": "NotFound", "message": "No model.", "param": 1}}',
            {"type": "NotFound", "message": "No model."},
        ),
        (b"Broken", {"type": "error", "message": "Broken"}),
    ],
)
def test_what_the_model_server_refuses_later_is_such_an_error_too(body: bytes, error: dict[str, str]) -> None:
    refused = ServedPart(body, 404, "application/json", ServedTokens())
    assert error_after(BEATS, answer_to([20.0, refused])) == ("", {"error": {**error, "code": 404}})


def test_an_exception_that_nobody_expected_shows_nothing_of_itself() -> None:
    _, data = error_after(BEATS, answer_to([20.0, KeyError("/secret/path")]))
    assert data["error"]["type"] == "urn:rollout:problem:internal"
    assert "secret" not in data["error"]["message"]


@pytest.mark.parametrize("leaves_after_s", [10.0, 20.0])
async def test_a_caller_that_leaves_a_stream_that_waits_aborts_its_call(leaves_after_s: float) -> None:
    server = ScriptedModelServer([40.0, *events()])
    service = ScriptedHttp(model_server=server)

    body = {"stream": True}
    call = asyncio.create_task(service.asked(lambda http: http.post("/v1/chat/completions", json=body)))
    await asyncio.sleep(leaves_after_s)
    await virtual_time.end_by_cancellation(call)
    assert server.was_left
    assert service.admission.in_flight.rollouts == 0


def read_by_official_client(parts: Sequence[ServedPart | Exception | float]) -> list[str]:
    response = httpx2.Response(200, content=answer_to(parts).content, headers={"content-type": EVENTS})
    http = httpx2.Client(transport=httpx2.MockTransport(lambda _request: response))
    with openai.OpenAI(base_url="http://service/v1", api_key="any", http_client=http, max_retries=0) as client:
        stream = client.chat.completions.create(model="any", messages=[], stream=True)
        return [chunk.choices[0].delta.content or "" for chunk in stream]


def test_the_official_client_passes_over_heartbeats() -> None:
    first, *rest = events()
    assert read_by_official_client([40.0, first, 31.0, ServedPart(CHUNK % b"!"), *rest]) == ["Hi", "!"]


def test_the_official_client_raises_an_error_that_comes_late() -> None:
    with pytest.raises(openai.APIError, match="It is gone"):
        read_by_official_client([40.0, GenerationLost("It is gone.")])
