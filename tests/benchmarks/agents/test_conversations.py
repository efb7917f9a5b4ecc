"""`make bench-agents`: the agents that it plays, against a server that answers in the form of OpenAI's."""

import asyncio
from typing import Any

import orjson
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from benchmarks.agents.conversations import Way, Workload, played, streamed

WORKLOAD = Workload(agents=2, calls=2, new_tokens=3)


class ScriptedServer:
    """Answers each call with its number of messages, and notes what was asked."""

    def __init__(self, tokens: int = 3) -> None:
        self.tokens = tokens
        self.calls: list[tuple[str, str, Any]] = []
        """Path, key and body."""
        self.deleted = list[str]()
        self.app = web.Application()
        self.app.router.add_post("/v1/sessions", self.open)
        self.app.router.add_delete("/v1/sessions/{session_id}", self.delete)
        self.app.router.add_post("/{path:.*}", self.complete)

    async def open(self, _request: web.Request) -> web.Response:
        return web.json_response({"id": "s", "api_key": "session-key"}, status=201)

    async def delete(self, request: web.Request) -> web.Response:
        self.deleted.append(request.path)
        return web.Response(status=204)

    async def complete(self, request: web.Request) -> web.Response:
        body = orjson.loads(await request.read())
        self.calls.append((request.path, request.headers.get("authorization", ""), body))
        text, usage = f"answer {len(body['messages'])}", {"completion_tokens": self.tokens}
        if not body.get("stream"):
            message: dict[str, Any] = {"role": "assistant", "content": None, "reasoning": text, "tool_calls": []}
            return web.json_response({"choices": [{"message": message}], "usage": usage})
        events = [{"choices": [{"delta": {"role": "assistant", "content": part}}]} for part in ("", *text.split(" "))]
        lines = [orjson.dumps(event) for event in (*events, {"choices": [], "usage": usage})]
        return web.Response(body=b"".join(b"data: %b\n\n" % line for line in (*lines, b"[DONE]")))


def play(server: ScriptedServer, way: Way) -> Any:
    async def play_there() -> Any:
        async with TestServer(server.app) as there:
            return await played(str(there.make_url("")).rstrip("/"), way, WORKLOAD, seed=1)

    return asyncio.run(play_there())


def test_each_conversation_goes_on_with_what_was_answered() -> None:
    server = ScriptedServer()
    seconds, calls = play(server, Way(is_vllm=True))
    assert (len(calls), seconds > 0) == (4, True)
    assert all(0 < call.first_s <= call.whole_s for call in calls)
    assert {path for path, _, _ in server.calls} == {"/v1/chat/completions"}
    first, second = (body["messages"] for _, _, body in server.calls if len(body["messages"]) == 3)
    assert [message["role"] for message in first] == ["user", "assistant", "user"]
    assert first[1] == {"role": "assistant", "content": "", "reasoning": "answer 1"}
    assert first[0] != second[0]
    assert server.calls[0][2] | {"messages": []} == {
        "messages": [], "max_tokens": 3, "ignore_eos": True, "temperature": 0,
    }  # fmt: skip


def test_equal_seeds_give_equal_conversations() -> None:
    servers = ScriptedServer(), ScriptedServer()
    for server in servers:
        play(server, Way())
    first, second = (sorted(orjson.dumps(body) for _, _, body in server.calls) for server in servers)
    assert first == second


def test_each_agent_has_a_session_which_is_deleted_afterwards() -> None:
    server = ScriptedServer()
    play(server, Way(has_session=True))
    assert {(path, key) for path, key, _ in server.calls} == {
        ("/v1/sessions/s/v1/chat/completions", "Bearer session-key")
    }
    assert server.deleted == ["/v1/sessions/s"] * 2


def test_streams_are_joined_and_tokens_are_asked_for() -> None:
    server = ScriptedServer()
    play(server, Way(streams=True, shows_tokens=True))
    body = next(body for _, _, body in server.calls if len(body["messages"]) == 3)
    assert body["messages"][1] == {"role": "assistant", "content": "answer1"}
    assert (body["stream"], body["logprobs"], body["return_token_ids"]) == (True, True, True)


def test_an_answer_of_another_length_ends_the_benchmark() -> None:
    with pytest.raises(RuntimeError, match="2 tokens, not 3"):
        play(ScriptedServer(tokens=2), Way())


def test_a_stream_without_an_end_ends_the_benchmark() -> None:
    with pytest.raises(RuntimeError, match="broke off"):
        streamed(b'data: {"choices": []}\n\n')
