"""Calls of servers inside the process: their answers in parts, their failures, and callers that go away."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.failures import ReplicaShuttingDown, RolloutFailure
from deployments.generation.serving.endpoints import _ServedAnswer, answer_parts, running_calls
from deployments.generation.serving.served_call import CURRENT_CALL, ServedCall
from deployments.protocols.generation import SamplingOptions
from deployments.protocols.model_server import ServedPart, ServedRequest
from tests.deployments.generation.serving.test_session_call import QUESTION, Replica, generate, prepared

# Importing vLLM takes seconds.
pytestmark = [pytest.mark.slow, pytest.mark.true_clock]
REQUEST = ServedRequest("call-1", range(3), 100, (), SamplingOptions(), body=b'{"a": 1}')
EVENTS = "text/event-stream"
Server = Callable[[ServedCall], Awaitable[_ServedAnswer]]


async def parts_of(server: Server, call: ServedCall) -> list[ServedPart]:
    return [part async for part in answer_parts(server, call) if part != ServedPart()]


async def test_events_come_in_their_order_and_the_last_part_says_so() -> None:
    async def events() -> AsyncGenerator[str, None]:
        for number in range(50):
            assert CURRENT_CALL.get().request is REQUEST
            yield f"data: {number}\n\n"
            await asyncio.sleep(0)

    async def server(_call: ServedCall) -> _ServedAnswer:
        return _ServedAnswer(200, EVENTS, events())

    parts = await parts_of(server, ServedCall(REQUEST))
    assert b"".join(part.body for part in parts) == b"".join(b"data: %d\n\n" % number for number in range(50))
    assert [part.status for part in parts] == [200] + [None] * (len(parts) - 1)
    assert [part.tokens is not None for part in parts] == [False] * (len(parts) - 1) + [True]


async def broken_events(call: ServedCall, failure: Exception, begins: bool = True) -> AsyncGenerator[str, None]:
    if begins:
        yield "first"
        await asyncio.sleep(0.05)
    if isinstance(failure, RolloutFailure):
        call.note_failure(failure)
        yield "error"
    else:
        raise failure


@pytest.mark.parametrize("begins", [False, True])
async def test_an_answer_that_breaks_off_does_not_end_like_a_whole_one(begins: bool) -> None:
    async def server(call: ServedCall) -> _ServedAnswer:
        return _ServedAnswer(200, EVENTS, broken_events(call, LookupError("nothing there"), begins))

    async with aclosing(answer_parts(server, ServedCall(REQUEST))) as parts:
        if begins:
            assert (await anext(parts)).body == b"first"
        with pytest.raises(RolloutFailure, match="broke off"):
            await anext(parts)


@pytest.mark.parametrize("has_begun", [False, True])
async def test_a_failure_is_another_replicas_until_the_answer_has_begun(has_begun: bool) -> None:
    async def server(call: ServedCall) -> _ServedAnswer:
        return _ServedAnswer(200, EVENTS, broken_events(call, ReplicaShuttingDown("it ends"), has_begun))

    call = ServedCall(REQUEST)
    if has_begun:
        assert b"".join([part.body for part in await parts_of(server, call)]) == b"firsterror"
    else:
        with pytest.raises(ReplicaShuttingDown):
            await parts_of(server, call)


async def test_a_call_of_a_session_is_left_when_its_server_ends() -> None:
    left: list[str] = []
    call = ServedCall(REQUEST)
    unchecked: Any = SimpleNamespace(leave=lambda *_: left.append("left"))
    call.session = unchecked

    async def server(_call: ServedCall) -> _ServedAnswer:
        raise LookupError("nothing there")

    with pytest.raises(LookupError, match="nothing there"):
        await parts_of(server, call)
    assert left == ["left"]


async def test_a_call_left_at_any_step_ends_and_its_tokens_are_recorded() -> None:
    steps, has_ended = 0, False
    while not has_ended:
        replica = await Replica().open()
        call = replica.call("one")
        has_generated = list[bool]()

        async def server(call: ServedCall, has_generated: list[bool] = has_generated) -> _ServedAnswer:
            await prepared(call, [QUESTION])
            generate(call, "7")
            has_generated.append(True)
            assert call.session is not None
            await call.record({0: {"role": "assistant", "content": "7"}})
            return _ServedAnswer(200, "application/json", b"7")

        parts = answer_parts(server, call)
        reading = asyncio.create_task(anext(parts))
        for _ in range(steps):
            await asyncio.sleep(0)
        has_ended = reading.done()
        reading.cancel()
        await asyncio.wait([reading])
        await parts.aclose()
        while running_calls or replica.calls.tasks:
            await running_calls.ended()
            await replica.calls.tasks.ended()
        info = await replica.store.info("s", "")
        assert info.calls_in_flight == 0, f"left after {steps} steps"
        assert info.branches == len(has_generated), f"left after {steps} steps"
        steps += 1
    assert steps > 10
