"""An OpenAI-compatible endpoint whose model is the policy: what is asked of it waits for the reply of the next step."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from rollout_env import ChatMessage
from rollout_env.loopback import LoopbackServer

MODEL = "policy"


class EndpointSession:
    """The requests of one episode, in the order in which they came.

    Guarantee: each request has an answer, or is refused when the session is closed.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        """The base URL for a client of OpenAI's."""
        self._requests: asyncio.Queue[tuple[dict[str, Any], asyncio.Future[ChatMessage]]] = asyncio.Queue()
        self._unanswered: set[asyncio.Future[ChatMessage]] = set()
        self._answer: asyncio.Future[ChatMessage] | None = None

    async def next_request(self) -> dict[str, Any]:
        """The body of the request that `answer` is for."""
        body, self._answer = await self._requests.get()
        return body

    @property
    def can_be_answered(self) -> bool:
        return self._answer is not None and not self._answer.done()

    def answer(self, response: ChatMessage) -> None:
        assert self._answer is not None
        self._answer.set_result(response)

    async def ask(self, body: dict[str, Any]) -> ChatMessage:
        """Raises `asyncio.CancelledError` if the session is closed before there is an answer."""
        answer: asyncio.Future[ChatMessage] = asyncio.get_running_loop().create_future()
        self._unanswered.add(answer)
        answer.add_done_callback(self._unanswered.discard)
        self._requests.put_nowait((body, answer))
        return await answer

    def close(self) -> None:
        for answer in list(self._unanswered):
            answer.cancel()


class ModelEndpoint:
    """`POST /KEY/v1/chat/completions`, answered by the session of that key."""

    def __init__(self) -> None:
        self._sessions: dict[str, EndpointSession] = {}
        route = Route("/{key}/v1/chat/completions", self._complete, methods=["POST"])
        self.app = Starlette(routes=[route])
        self._server = LoopbackServer(self.app)
        self._url = ""

    async def start(self) -> None:
        self._url = await self._server.start()

    async def stop(self) -> None:
        await self._server.stop()

    @contextmanager
    def session(self) -> Iterator[EndpointSession]:
        """A session that is open for the length of the block."""
        key = uuid4().hex
        session = self._sessions[key] = EndpointSession(f"{self._url}/{key}/v1")
        try:
            yield session
        finally:
            del self._sessions[key]
            session.close()

    async def _complete(self, request: Request) -> Response:
        session = self._sessions.get(request.path_params["key"])
        if session is None:
            return JSONResponse({"error": {"message": "The episode has ended."}}, status_code=410)
        body = await request.json()
        try:
            message = completion_message(await session.ask(body))
        except asyncio.CancelledError:
            return JSONResponse({"error": {"message": "The episode was cut off."}}, status_code=410)
        if body.get("stream"):
            return StreamingResponse(chunks_of(message), media_type="text/event-stream")
        return JSONResponse(completion("chat.completion", message=message))


def completion_message(response: ChatMessage) -> dict[str, Any]:
    """The response in OpenAI's form, with the calls that the service has parsed."""
    message: dict[str, Any] = {"role": "assistant", "content": response.get("parsed_content", response["content"])}
    if calls := response.get("tool_calls"):
        message["tool_calls"] = calls
    return message


def completion(kind: str, **choice: Any) -> dict[str, Any]:
    message = choice.get("message") or choice.get("delta") or {}
    reason = None if kind.endswith("chunk") and message else "tool_calls" if message.get("tool_calls") else "stop"
    choices = [{"index": 0, "finish_reason": reason, **choice}]
    usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    return {"id": uuid4().hex, "object": kind, "created": 0, "model": MODEL, "choices": choices, "usage": usage}


async def chunks_of(message: dict[str, Any]) -> AsyncIterator[str]:
    """The message as a stream of one piece."""
    calls = [{**call, "index": place} for place, call in enumerate(message.get("tool_calls", []))]
    delta = {**message, "tool_calls": calls} if calls else message
    for chunk in (
        completion("chat.completion.chunk", delta=delta),
        completion("chat.completion.chunk", delta={}, finish_reason="tool_calls" if calls else "stop"),
    ):
        yield f"data: {json.dumps(chunk)}\n\n"
    yield "data: [DONE]\n\n"


def new_messages(messages: list[dict[str, Any]]) -> list[ChatMessage]:
    """Those after the last response."""
    places = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    return [chat_message(message) for message in messages[places[-1] + 1 if places else 0 :]]


def chat_message(message: dict[str, Any]) -> ChatMessage:
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "\n".join(part.get("text", "") for part in content)
    chat: ChatMessage = {"role": message["role"], "content": content}
    if "tool_call_id" in message:
        chat["tool_call_id"] = message["tool_call_id"]
    if message.get("name"):
        chat["name"] = message["name"]
    return chat
