"""Calls of an application inside the process: its answer in parts, its failures, and callers that go away."""

import asyncio
from contextlib import aclosing
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

from deployments.failures import ReplicaShuttingDown, RolloutFailure
from deployments.generation.serving.asgi_calls import PATHS, answer_parts
from deployments.generation.serving.served_call import CURRENT_CALL, GeneratedChoice, ServedCall
from deployments.protocols.generation import SamplingOptions, packed_ids
from deployments.protocols.model_server import ServedPart, ServedRequest, ServedTokens
from tests.virtual_time import runs

REQUEST = ServedRequest("call-1", range(3), 100, (), SamplingOptions(), body=b'{"a": 1}')


async def parts_of(app: Any, call: ServedCall) -> list[ServedPart]:
    return [part async for part in answer_parts(app, call) if part != ServedPart()]


@runs
async def test_a_call_has_its_path_its_body_and_its_name() -> None:
    app, seen = FastAPI(), []

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> dict[str, str]:
        seen.append((await request.json(), request.headers["x-request-id"], CURRENT_CALL.get()))
        CURRENT_CALL.get().choices[0] = GeneratedChoice(packed_ids(range(5)))
        return {"said": "it"}

    call = ServedCall(REQUEST, prompts={0: 3})
    [part] = await parts_of(app, call)
    assert part == ServedPart(b'{"said":"it"}', 200, "application/json", ServedTokens(3, 5))
    assert seen == [({"a": 1}, "call-1", call)]


@pytest.mark.parametrize("endpoint", PATHS)
@runs
async def test_every_endpoint_has_its_path(endpoint: Any) -> None:
    asked = []

    async def app(scope: Any, _receive: Any, send: Any) -> None:
        asked.append((scope["method"], scope["path"]))
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    [part] = await parts_of(app, ServedCall(replace(REQUEST, endpoint=endpoint)))
    assert (part.status, asked) == (204, [PATHS[endpoint]])


@runs
async def test_events_come_in_their_order_and_the_last_part_says_so() -> None:
    async def events() -> Any:
        for number in range(50):
            yield f"data: {number}\n\n"
            await asyncio.sleep(0)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await StreamingResponse(events(), media_type="text/event-stream")(scope, receive, send)

    parts = await parts_of(app, ServedCall(REQUEST))
    assert b"".join(part.body for part in parts) == b"".join(b"data: %d\n\n" % number for number in range(50))
    assert [part.status for part in parts] == [200] + [None] * (len(parts) - 1)
    assert [part.tokens is not None for part in parts] == [False] * (len(parts) - 1) + [True]


@runs
async def test_what_breaks_before_the_answer_is_raised() -> None:
    async def app(_scope: Any, _receive: Any, _send: Any) -> None:
        raise LookupError("nothing there")

    with pytest.raises(LookupError, match="nothing there"):
        await parts_of(app, ServedCall(REQUEST))


@runs
async def test_an_answer_that_breaks_off_does_not_end_like_a_whole_one() -> None:
    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"first", "more_body": True})
        await asyncio.sleep(0.05)
        raise LookupError("nothing there")

    async with aclosing(answer_parts(app, ServedCall(REQUEST))) as parts:
        assert (await anext(parts)).body == b"first"
        with pytest.raises(RolloutFailure, match="broke off"):
            await anext(parts)


@pytest.mark.parametrize("has_begun", [False, True])
@runs
async def test_a_failure_is_another_replicas_until_the_answer_has_begun(has_begun: bool) -> None:
    call = ServedCall(REQUEST)

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if has_begun:
            await send({"type": "http.response.body", "body": b"first", "more_body": True})
            await asyncio.sleep(0.05)
        call.note_failure(ReplicaShuttingDown("it ends"))
        await send({"type": "http.response.body", "body": b"error"})

    if has_begun:
        assert b"".join([part.body for part in await parts_of(app, call)]) == b"firsterror"
    else:
        with pytest.raises(ReplicaShuttingDown):
            await parts_of(app, call)


@runs
async def test_a_call_of_a_session_is_left_when_its_application_ends_whatever_it_has_done() -> None:
    left: list[str] = []
    call = ServedCall(REQUEST)
    unchecked: Any = SimpleNamespace(leave=lambda: left.append("left"))
    call.session = unchecked

    async def app(_scope: Any, _receive: Any, _send: Any) -> None:
        raise LookupError("nothing there")

    with pytest.raises(LookupError):
        await parts_of(app, call)
    assert left == ["left"]


@runs
async def test_an_application_is_told_when_its_caller_goes_away() -> None:
    told = asyncio.Event()

    async def app(_scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"first", "more_body": True})
        assert (await receive())["type"] == "http.disconnect"
        told.set()

    async with aclosing(answer_parts(app, ServedCall(REQUEST))) as parts:
        assert (await anext(parts)).body == b"first"
        assert not told.is_set()
    await told.wait()
