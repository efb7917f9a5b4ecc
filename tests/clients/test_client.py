"""The clients against a scripted service: what is sent, what comes back, what is tried again, what failures say."""

import asyncio
import json
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import httpx
import pytest
from fastapi.responses import PlainTextResponse, Response, StreamingResponse
from hypothesis import given
from hypothesis import strategies as st
from tenacity import wait_none

from rollout_client import (
    AsyncRolloutClient,
    Message,
    PromptMessage,
    RequestRejected,
    ResponseNotUnderstood,
    RolloutClient,
    RolloutResponse,
    RolloutTimeout,
    SampleInput,
    SampleResult,
    Sampling,
    ServiceFailed,
    ServiceUnreachable,
    StreamBroken,
)
from rollout_client.arrow.response import ArrowResponse
from rollout_client.contract import RequestMetrics
from rollout_client.errors import seconds_until
from rollout_client.ndjson import NdjsonReader
from tests.clients.scripted_service import (
    REJECTED,
    SUMMARY,
    Json,
    ScriptedService,
    arrow,
    lines_of,
    ndjson,
    problem,
    result,
    running,
    sample,
    unavailable,
)

Play = Callable[..., RolloutResponse]
FAILED: Json = {"type": "about:blank", "title": "Generation failed", "status": 500, "detail": "The engine is gone."}


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedService]:
    monkeypatch.setattr("rollout_client.retry.BACKOFF", wait_none())
    with running(ScriptedService()) as scripted:
        yield scripted


def play_sync(url: str, *samples: SampleInput | Json, client: Json | None = None, **options: Any) -> RolloutResponse:
    with RolloutClient(url, **(client or {})) as rollout_client:
        return rollout_client.rollout(samples, **options)


def play_async(url: str, *samples: SampleInput | Json, client: Json | None = None, **options: Any) -> RolloutResponse:
    async def play() -> RolloutResponse:
        async with AsyncRolloutClient(url, **(client or {})) as rollout_client:
            return await rollout_client.rollout(samples, **options)

    return asyncio.run(play())


@pytest.fixture(params=[play_sync, play_async], ids=["sync", "async"])
def play(request: pytest.FixtureRequest) -> Play:
    chosen: Play = request.param
    return chosen


def stream_sync(url: str, *samples: Json, client: Json | None = None, **options: Any) -> list[tuple[int, SampleResult]]:
    with RolloutClient(url, **(client or {})) as rollout_client, rollout_client.stream(samples, **options) as rollouts:
        return list(rollouts.with_positions())


def stream_async(
    url: str, *samples: Json, client: Json | None = None, **options: Any
) -> list[tuple[int, SampleResult]]:
    async def play() -> list[tuple[int, SampleResult]]:
        async with (
            AsyncRolloutClient(url, **(client or {})) as rollout_client,
            rollout_client.stream(samples, **options) as rollouts,
        ):
            return [placed async for placed in rollouts.with_positions()]

    return asyncio.run(play())


@pytest.fixture(params=[stream_sync, stream_async], ids=["sync", "async"])
def stream(request: pytest.FixtureRequest) -> Callable[..., list[tuple[int, SampleResult]]]:
    chosen: Callable[..., list[tuple[int, SampleResult]]] = request.param
    return chosen


@contextmanager
def breaking_server(answers: list[bytes]) -> Iterator[tuple[str, list[bytes]]]:
    """Gives each connection the next of `answers`, then closes it; yields its URL and what it was sent."""
    received: list[bytes] = []

    def serve() -> None:
        for answer in answers:
            connection, _ = listening.accept()
            with connection:
                received.append(connection.recv(65536))
                connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", received
        thread.join(timeout=5)


def json_answer(document: Json) -> bytes:
    body = json.dumps(document).encode()
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n"
    return head.encode() + b"\r\n" + body


def free_url() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


def arrow_sync(url: str, *samples: SampleInput | Json, client: Json | None = None, **options: Any) -> ArrowResponse:
    with RolloutClient(url, **(client or {})) as rollout_client:
        return rollout_client.rollout_arrow(samples, **options)


def arrow_async(url: str, *samples: SampleInput | Json, client: Json | None = None, **options: Any) -> ArrowResponse:
    async def play() -> ArrowResponse:
        async with AsyncRolloutClient(url, **(client or {})) as rollout_client:
            return await rollout_client.rollout_arrow(samples, **options)

    return asyncio.run(play())


@pytest.fixture(params=[arrow_sync, arrow_async], ids=["sync", "async"])
def play_arrow(request: pytest.FixtureRequest) -> Callable[..., ArrowResponse]:
    chosen: Callable[..., ArrowResponse] = request.param
    return chosen


# What is sent


def test_only_what_is_given_is_sent(service: ScriptedService, play: Play) -> None:
    play(service.url, sample(note="mine"), max_seq_len=None)
    assert service.bodies == [{"samples": [sample(note="mine")]}]


def test_typed_samples_and_sampling_are_sent_without_the_fields_that_were_not_set(
    service: ScriptedService, play: Play
) -> None:
    typed = SampleInput(
        task_name="math",
        messages=[PromptMessage(role="user", content="Hi")],
        further=[1],  # type: ignore[call-arg]
    )
    play(
        service.url,
        typed,
        num_generations=2,
        sampling=Sampling(temperature=0.5),
        max_seq_len=64,
        max_rollout_turns=3,
        observation_format="raw",
    )
    assert service.bodies == [
        {
            "samples": [{"task_name": "math", "messages": [{"role": "user", "content": "Hi"}], "further": [1]}],
            "num_generations": 2,
            "sampling": {"temperature": 0.5},
            "max_seq_len": 64,
            "max_rollout_turns": 3,
            "observation_format": "raw",
        }
    ]


def test_a_message_log_that_came_back_can_be_posted_again(service: ScriptedService, play: Play) -> None:
    came_back = play(service.url, sample()).samples[0].message_log
    play(service.url, {"task_name": "math", "message_log": came_back})
    assert [Message(**message) for message in service.bodies[1]["samples"][0]["message_log"]] == came_back


def test_a_value_that_is_no_json_is_a_value_error_before_anything_is_sent(service: ScriptedService, play: Play) -> None:
    with pytest.raises(ValueError, match="Unable to serialize unknown type"):
        play(service.url, sample(handle=object()))
    assert service.bodies == []


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://", "http://host:port"])
@pytest.mark.parametrize("client", [RolloutClient, AsyncRolloutClient])
def test_a_base_url_that_is_none_is_a_value_error(client: Callable[[str], object], url: str) -> None:
    with pytest.raises(ValueError, match=r"is not (a URL|the URL of a service)"):
        client(url)


# What comes back


@pytest.mark.parametrize("progress", [False, True])
def test_results_come_in_input_order_whatever_their_idx(service: ScriptedService, play: Play, progress: bool) -> None:
    response = play(service.url, sample(idx=7), sample(idx=7), sample(idx=3), num_generations=2, progress=progress)
    assert [(played.idx, played.generation_index) for played in response.samples] == [
        (7, 0),
        (7, 1),
        (7, 0),
        (7, 1),
        (3, 0),
        (3, 1),
    ]
    assert response.model_dump(exclude={"samples"}) == SUMMARY


def test_the_progress_bar_counts_rollouts_tokens_and_failures(
    service: ScriptedService, play: Play, capsys: pytest.CaptureFixture[str]
) -> None:
    error = {"kind": "generation", "message": "The replica died.", "retryable": True}
    failed = {"position": 1, "sample": result(1, status="error", error=error)}
    service.rollouts.append(lambda _: ndjson(failed, {"position": 0, "sample": result()}, {"summary": SUMMARY}))
    play(service.url, sample(), sample(), progress=True)
    assert "2/2 rollouts, 4 tokens generated, 1 failed" in capsys.readouterr().err


def test_a_stream_gives_each_sample_with_its_position_as_it_ends(
    service: ScriptedService, stream: Callable[..., list[tuple[int, SampleResult]]]
) -> None:
    placed = stream(service.url, sample(), sample(), num_generations=2)
    assert [(position, played.idx, played.generation_index) for position, played in placed] == [
        (3, 1, 1),
        (2, 1, 0),
        (1, 0, 1),
        (0, 0, 0),
    ]


def test_a_sample_can_be_used_before_the_next_has_ended(service: ScriptedService) -> None:
    service.rollouts.append(lambda _: service.hanging({"position": 1, "sample": result(1)}))
    with RolloutClient(service.url) as client, client.stream([sample(), sample()]) as rollouts:
        assert next(iter(rollouts)).idx == 1


def test_the_summary_is_there_after_the_last_sample_and_an_error_before(service: ScriptedService) -> None:
    with RolloutClient(service.url) as client, client.stream([sample()]) as rollouts:
        with pytest.raises(RuntimeError, match="iterate to the end first"):
            _ = rollouts.summary
        assert len(list(rollouts)) == rollouts.expected == 1
    assert rollouts.summary.metrics == {"mean_total_reward": 0.5, "total_turns": 4.0}


def test_the_async_summary_is_there_after_the_last_sample(service: ScriptedService) -> None:
    async def read() -> tuple[int, RequestMetrics]:
        async with AsyncRolloutClient(service.url) as client, client.stream([sample()]) as rollouts:
            count = len([played async for played in rollouts])
        return count, rollouts.summary.metrics

    assert asyncio.run(read()) == (1, {"mean_total_reward": 0.5, "total_turns": 4.0})


def test_a_stream_that_was_left_off_goes_on_where_it_was(service: ScriptedService) -> None:
    with RolloutClient(service.url) as client, client.stream([sample(), sample()]) as rollouts:
        assert [played.idx for played in [next(iter(rollouts)), *rollouts]] == [1, 0]


def test_a_stream_outside_a_with_statement_says_so(service: ScriptedService) -> None:
    with RolloutClient(service.url) as client, pytest.raises(RuntimeError, match=r"with client\.stream"):
        list(client.stream([sample()]))


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c"])
def test_line_separators_inside_a_text_do_not_end_a_line(service: ScriptedService, separator: str) -> None:
    content = f"a{separator}b"
    service.rollouts.append(lambda _: ndjson({"position": 0, "sample": result(content=content)}, {"summary": SUMMARY}))
    assert stream_sync(service.url, sample())[0][1].message_log[1].content == content


@given(st.lists(st.integers(min_value=1, max_value=5000), max_size=20))
def test_lines_are_the_same_however_the_bytes_are_cut(cuts: list[int]) -> None:
    lines = [json.dumps(line) for line in lines_of({"samples": [sample(), sample(), sample()]})]
    sent = "".join(f"{line}\n" for line in lines).encode()
    ends = [*sorted(min(cut, len(sent)) for cut in cuts), len(sent)]
    reader = NdjsonReader(3)
    read = [
        position for start, end in zip([0, *ends], ends, strict=False) for position, _ in reader.feed(sent[start:end])
    ]
    reader.end()
    assert read == [2, 1, 0]
    assert reader.summary is not None


# As Arrow


def test_rollouts_as_arrow_are_asked_for_and_answered_as_in_json(
    service: ScriptedService, play: Play, play_arrow: Callable[..., ArrowResponse]
) -> None:
    asked: Json = {"num_generations": 2, "sampling": Sampling(temperature=0.5)}
    samples = [sample(idx=7, note=None), sample(idx=3)]
    by_json = play(service.url, *samples, **asked)
    by_arrow = play_arrow(service.url, *samples, **asked)
    assert service.bodies[0] == service.bodies[1]
    assert by_arrow.to_response() == by_json


def test_an_arrow_answer_that_broke_off_is_an_error(
    service: ScriptedService, play_arrow: Callable[..., ArrowResponse]
) -> None:
    whole = arrow(result()).body
    service.rollouts += [lambda _: Response(whole[:-100]), lambda _: ndjson({"summary": SUMMARY})]
    for _ in range(2):
        with pytest.raises(ResponseNotUnderstood, match="no Arrow stream, or not a whole one"):
            play_arrow(service.url, sample())
    head = f"HTTP/1.1 200 OK\r\ncontent-length: {len(whole)}\r\n\r\n".encode()
    with breaking_server([head + whole[:-100]]) as (url, _), pytest.raises(StreamBroken, match="broke off"):
        play_arrow(url, sample(), retries=0)


def test_a_rejected_request_is_the_same_error_where_arrow_was_asked_for(
    service: ScriptedService, play_arrow: Callable[..., ArrowResponse]
) -> None:
    service.rollouts.append(lambda _: problem(REJECTED))
    with pytest.raises(RequestRejected, match="there is no task 'maths'"):
        play_arrow(service.url, sample("maths"))


# Leaving early


def test_leaving_a_stream_early_ends_the_request(service: ScriptedService) -> None:
    service.rollouts.append(lambda _: service.hanging({"position": 0, "sample": result()}))
    with RolloutClient(service.url) as client:
        with client.stream([sample(), sample()]) as rollouts:
            for _ in rollouts:
                break
        assert service.hung_up.wait(timeout=5)


def test_leaving_an_async_stream_early_ends_the_request(service: ScriptedService) -> None:
    async def leave() -> bool:
        async with AsyncRolloutClient(service.url) as client:
            async with client.stream([sample(), sample()]) as rollouts:
                async for _ in rollouts:
                    break
            return await asyncio.to_thread(service.hung_up.wait, 5)

    service.rollouts.append(lambda _: service.hanging({"position": 0, "sample": result()}))
    assert asyncio.run(leave())


def test_cancelling_an_async_rollout_ends_the_request(service: ScriptedService) -> None:
    async def cancel() -> bool:
        async with AsyncRolloutClient(service.url) as client:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(client.rollout([sample()]), timeout=0.3)
            return await asyncio.to_thread(service.hung_up.wait, 5)

    service.rollouts.append(lambda _: service.hanging())
    assert asyncio.run(cancel())


# What is tried again


def test_a_503_is_tried_again(service: ScriptedService, play: Play) -> None:
    service.rollouts += [lambda _: unavailable(), lambda _: PlainTextResponse("no replica", 503)]
    assert len(play(service.url, sample()).samples) == 1
    assert len(service.bodies) == 3


def test_a_retry_is_logged_with_its_reason(
    service: ScriptedService, play: Play, caplog: pytest.LogCaptureFixture
) -> None:
    service.rollouts.append(lambda _: unavailable())
    play(service.url, sample())
    assert caplog.messages == ["Not now (503): No replica is ready. Trying again in 0.0 s."]


def test_retries_are_as_many_as_asked_for(service: ScriptedService, play: Play) -> None:
    service.rollouts += [lambda _: unavailable()] * 5
    with pytest.raises(ServiceFailed, match=r"^Not now \(503\): No replica is ready\.$"):
        play(service.url, sample(), client={"retries": 2})
    assert len(service.bodies) == 3


def test_retry_after_is_waited_for(service: ScriptedService, play: Play) -> None:
    service.rollouts.append(lambda _: unavailable({"retry-after": "1"}))
    started_at = time.monotonic()
    play(service.url, sample())
    assert time.monotonic() - started_at >= 1


def test_no_attempt_starts_after_timeout_s(service: ScriptedService, play: Play) -> None:
    service.rollouts.append(lambda _: unavailable({"retry-after": "60"}))
    with pytest.raises(ServiceFailed) as failed:
        play(service.url, sample(), client={"timeout_s": 5})
    assert failed.value.retry_after_s == 60
    assert len(service.bodies) == 1


def test_a_rejected_request_is_not_tried_again(service: ScriptedService, play: Play) -> None:
    service.rollouts.append(lambda _: problem(REJECTED))
    with pytest.raises(RequestRejected):
        play(service.url, sample())
    assert len(service.bodies) == 1


@pytest.mark.usefixtures("service")
def test_a_connection_that_broke_before_the_answer_is_tried_again(play: Play) -> None:
    answer = json_answer({**SUMMARY, "samples": [result()]})
    with breaking_server([b"", b"", answer]) as (url, received):
        assert len(play(url, sample()).samples) == 1
    assert len(received) == 3


@pytest.mark.usefixtures("service")
def test_a_response_that_broke_off_is_asked_for_again(play: Play) -> None:
    response = json_answer({**SUMMARY, "samples": [result()]})
    with breaking_server([response[:-5], response]) as (url, received):
        assert len(play(url, sample()).samples) == 1
    assert len(received) == 2


# What each failure says


@pytest.mark.usefixtures("service")
def test_nobody_listening_is_unreachable_and_names_the_url(play: Play) -> None:
    url = free_url()
    with pytest.raises(ServiceUnreachable, match=f"^{url} cannot be reached: "):
        play(url, sample())


def test_a_rejected_request_names_field_value_and_what_to_do(service: ScriptedService, play: Play) -> None:
    service.rollouts.append(lambda _: problem(REJECTED))
    with pytest.raises(RequestRejected) as rejected:
        play(service.url, sample("maths"))
    assert str(rejected.value) == (
        "The request is not valid; nothing was started (422): samples[0].task_name: there is no task 'maths'; "
        "the known ones are math (got 'maths')"
    )
    assert rejected.value.problem.errors[0].field == "samples[0].task_name"


def test_several_field_problems_are_a_list_and_a_long_one_is_cut(service: ScriptedService, play: Play) -> None:
    errors = [{"field": f"samples[{place}].seed", "message": "too small", "value": -1} for place in range(12)]
    service.rollouts.append(lambda _: problem({**REJECTED, "errors": errors}))
    with pytest.raises(RequestRejected) as rejected:
        play(service.url, sample())
    lines = str(rejected.value).split("\n")
    assert lines[0] == "The request is not valid; nothing was started (422):"
    assert lines[1] == "  - samples[0].seed: too small (got -1)"
    assert lines[-1] == "  - and 2 more"
    assert len(lines) == 12


def test_an_error_without_a_problem_document_shows_its_text(service: ScriptedService, play: Play) -> None:
    service.rollouts.append(lambda _: PlainTextResponse("upstream is gone\n", 502))
    with pytest.raises(ServiceFailed, match=r"^Bad Gateway \(502\): upstream is gone$"):
        play(service.url, sample(), retries=0)


def test_an_answer_that_is_not_of_the_contract_says_where(service: ScriptedService, play: Play) -> None:
    service.rollouts.append(lambda _: PlainTextResponse('{"samples": []}'))
    with pytest.raises(ResponseNotUnderstood, match="POST /rollout is not what this client knows at request_id: "):
        play(service.url, sample())


def test_a_problem_in_a_stream_is_raised_after_the_samples_before_it(service: ScriptedService) -> None:
    service.rollouts.append(lambda _: ndjson({"position": 1, "sample": result(1)}, {"problem": FAILED}))
    with RolloutClient(service.url) as client, client.stream([sample(), sample()]) as rollouts:
        samples = iter(rollouts)
        assert next(samples).idx == 1
        with pytest.raises(ServiceFailed, match=r"^Generation failed \(500\): The engine is gone\.$"):
            next(samples)


@pytest.mark.parametrize(
    ("lines", "error", "message"),
    [
        ([], StreamBroken, "ended after 0 of 2 rollouts, without summary"),
        ([{"position": 0, "sample": result()}], StreamBroken, "ended after 1 of 2 rollouts, without summary"),
        ([{"summary": SUMMARY}], StreamBroken, "The summary came after 0 of 2 rollouts"),
        ([{"position": 2, "sample": result()}], ResponseNotUnderstood, "position that is not expected: 2"),
        ([{"position": 0, "sample": result()}] * 2, ResponseNotUnderstood, "position that is not expected: 0"),
        ([{"sample": result()}], ResponseNotUnderstood, "position that is not expected: None"),
        ([{"news": 1}], ResponseNotUnderstood, "has no sample, summary or problem"),
        ([{"position": "x"}], ResponseNotUnderstood, "is not what this client knows at position"),
        ([*lines_of({"samples": [sample()] * 2}), {"news": 1}], ResponseNotUnderstood, "came after its summary"),
    ],
)
def test_a_stream_that_is_not_whole_is_an_error(
    service: ScriptedService,
    stream: Callable[..., list[tuple[int, SampleResult]]],
    lines: list[Json],
    error: type[Exception],
    message: str,
) -> None:
    service.rollouts.append(lambda _: ndjson(*lines))
    with pytest.raises(error, match=message):
        stream(service.url, sample(), sample())
    assert len(service.bodies) == 1


def test_a_stream_cut_within_its_last_line_is_broken(
    service: ScriptedService, stream: Callable[..., list[tuple[int, SampleResult]]]
) -> None:
    placed = json.dumps({"position": 0, "sample": result()}).encode()
    cut = placed + b"\n" + json.dumps({"summary": SUMMARY}).encode()[:-2]
    service.rollouts.append(lambda _: StreamingResponse(iter([cut])))
    with pytest.raises(StreamBroken, match="ended after 1 of 1 rollouts, without summary"):
        stream(service.url, sample())


@pytest.mark.usefixtures("service")
def test_a_connection_lost_during_a_stream_is_broken(stream: Callable[..., list[tuple[int, SampleResult]]]) -> None:
    line = json.dumps({"position": 0, "sample": result()}).encode() + b"\n"
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    answer = head + b"%x\r\n%s\r\n" % (len(line), line)
    with breaking_server([answer]) as (url, _), pytest.raises(StreamBroken, match="The response broke off"):
        stream(url, sample(), sample())


# Times


def test_a_rollout_longer_than_timeout_s_is_ended(
    service: ScriptedService, stream: Callable[..., list[tuple[int, SampleResult]]]
) -> None:
    service.rollouts.append(lambda _: service.hanging({"position": 0, "sample": result()}))
    with pytest.raises(RolloutTimeout, match=r"not complete after 0\.\d+ s"):
        stream(service.url, sample(), sample(), client={"timeout_s": 0.3})
    assert service.hung_up.wait(timeout=5)
    assert len(service.bodies) == 1


def test_silence_before_the_answer_counts_toward_timeout_s(play: Play) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(RolloutTimeout):
        play(f"http://127.0.0.1:{silent.getsockname()[1]}", sample(), client={"timeout_s": 0.2})


def test_a_stream_that_trickles_on_is_ended_at_timeout_s(service: ScriptedService) -> None:
    def trickle(_: Json) -> StreamingResponse:
        def lines() -> Iterator[bytes]:
            for position in range(100):
                time.sleep(0.05)
                yield json.dumps({"position": position, "sample": result()}).encode() + b"\n"

        return StreamingResponse(lines())

    service.rollouts.append(trickle)
    started_at = time.monotonic()
    with pytest.raises(RolloutTimeout):
        stream_sync(service.url, *[sample()] * 100, client={"timeout_s": 0.5})
    assert time.monotonic() - started_at < 5, "the stream was read to its end"


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("7", 7.0), (" 0 ", 0.0), ("soon", None), (None, None), ("Wed, 21 Oct 2015 07:28:00 GMT", 0.0)],
)
def test_retry_after_is_seconds_or_a_date(header: str | None, seconds: float | None) -> None:
    assert seconds_until(header) == seconds


def test_a_retry_after_date_is_the_time_until_then() -> None:
    then = format_datetime(datetime.now(UTC) + timedelta(seconds=30), usegmt=True)
    assert seconds_until(then) == pytest.approx(30, abs=2)


# Readiness and tasks


def test_waiting_until_ready_outlasts_a_start(service: ScriptedService) -> None:
    service.readiness += [PlainTextResponse("no such path", 404), unavailable(), PlainTextResponse("starting", 500)]
    with RolloutClient(service.url) as client:
        client.wait_until_ready(timeout_s=10)
    assert not service.readiness


def test_waiting_asynchronously_until_ready_outlasts_a_start(service: ScriptedService) -> None:
    async def wait() -> None:
        async with AsyncRolloutClient(service.url) as client:
            await client.wait_until_ready(timeout_s=10)

    service.readiness += [PlainTextResponse("no such path", 404), unavailable()]
    asyncio.run(wait())
    assert not service.readiness


def test_a_service_that_does_not_get_ready_says_why(service: ScriptedService) -> None:
    service.readiness += [unavailable() for _ in range(10)]
    reason = rf"^{service.url} is not ready after 0\.6 s\. Not now \(503\): No replica is ready\.$"
    with RolloutClient(service.url) as client, pytest.raises(ServiceUnreachable, match=reason):
        client.wait_until_ready(timeout_s=0.6)


def test_an_async_wait_for_nobody_ends_with_why() -> None:
    async def wait() -> None:
        async with AsyncRolloutClient(free_url()) as client:
            await client.wait_until_ready(timeout_s=0.6)

    with pytest.raises(ServiceUnreachable, match=r"is not ready after 0\.6 s\. http://127"):
        asyncio.run(wait())


def test_tasks_and_their_samples_come_typed_and_ready_to_post(service: ScriptedService) -> None:
    with RolloutClient(service.url) as client:
        assert [task.task_name for task in client.tasks()] == ["math"]
        samples = client.example_samples("a/b c", count=2, seed=5)
        client.rollout(samples)
    assert service.bodies == [{"samples": [sample("a/b c", seed=5)] * 2}]


def test_the_async_client_gives_the_same_tasks_and_samples(service: ScriptedService) -> None:
    async def ask() -> tuple[list[str], int]:
        async with AsyncRolloutClient(service.url) as client:
            return [task.task_name for task in await client.tasks()], len(await client.example_samples("math"))

    assert asyncio.run(ask()) == (["math"], 8)


def test_samples_of_an_unknown_task_are_refused_by_name(service: ScriptedService) -> None:
    with RolloutClient(service.url) as client, pytest.raises(RequestRejected, match="the known ones are math"):
        client.example_samples("maths")


# The package


def test_a_transport_can_take_the_place_of_the_network() -> None:
    answer = {**SUMMARY, "samples": [result()]}
    transport = httpx.MockTransport(lambda _: httpx.Response(200, json=answer))
    with httpx.Client(transport=transport) as http_client:
        client = RolloutClient("http://nowhere", http_client=http_client)
        assert client.rollout([sample()]).request_id == "r1"


def test_many_async_rollouts_run_at_once(service: ScriptedService) -> None:
    at_once = 150
    arrived: list[int] = []
    all_here = asyncio.Event()

    @service.app.post("/together/rollout")
    async def together() -> Json:
        arrived.append(1)
        if len(arrived) == at_once:
            all_here.set()
        await all_here.wait()
        return {**SUMMARY, "samples": [result()]}

    async def play_all() -> int:
        async with AsyncRolloutClient(f"{service.url}/together", timeout_s=30) as client:
            return len(await asyncio.gather(*(client.rollout([sample()]) for _ in range(at_once))))

    assert asyncio.run(play_all()) == at_once


def test_importing_the_client_needs_nothing_heavy() -> None:
    program = """
        import sys
        absent = ["rich", "typer", "ray", "vllm", "torch", "numpy", "transformers", "fastapi", "service", "deployments"]
        sys.modules.update(dict.fromkeys(absent))
        import rollout_client
        try:
            with rollout_client.RolloutClient() as client:
                client.rollout([], progress=True)
        except ModuleNotFoundError as error:
            sys.exit(str(error))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=False)
    assert done.stderr == 'A progress bar needs rich: pip install "rollout-client[cli]"\n'
