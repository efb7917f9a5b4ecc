"""The ways in which nobody waits for calls of a model server's API any more. They need an engine with a model."""

import asyncio
from functools import partial
from time import monotonic
from typing import Any

import httpx

from benchmarks.cancellation.measuring import Abandon, Work, cancelled, generations, streams_left

CALLS = 32
COMPLETIONS = "/v1/chat/completions"
BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Wait."}],
    "max_tokens": 4000,
    "ignore_eos": True,
}
"""Longer than any round, however fast the engine is."""


async def hang_up_call(client: httpx.AsyncClient) -> Abandon:
    """The client closes its connections before it has an answer."""
    return partial(cancelled, [asyncio.create_task(client.post(COMPLETIONS, json=BODY)) for _ in range(CALLS)])


async def leave_call_stream(client: httpx.AsyncClient) -> Abandon:
    """The client closes its connections when the streams have begun."""
    return await streams_left(client, COMPLETIONS, [{**BODY, "stream": True}] * CALLS)


async def delete_session(client: httpx.AsyncClient) -> Abandon:
    """The session of the calls is deleted; they are answered with what there is."""
    session = (await client.post("/v1/sessions", json={})).raise_for_status().json()
    path, key = f"/v1/sessions/{session['id']}", {"authorization": f"Bearer {session['api_key']}"}
    calls = [asyncio.create_task(client.post(path + COMPLETIONS, json=BODY, headers=key)) for _ in range(CALLS)]

    async def abandon() -> float:
        began = monotonic()
        (await client.delete(path)).raise_for_status()
        await asyncio.wait(calls)
        return began

    return abandon


CALL_WORK = Work(
    {way.__name__: way for way in (hang_up_call, leave_call_stream, delete_session)},
    lambda: (generations(),),
    (CALLS,),
)
