"""The agents of `examples/agents` with the real frameworks, and a model server that answers as it is told."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

from examples.agents import agents_sdk, langgraph_agent, smolagents_agent
from rollout_client import SampleInput
from tests.clients.scripted_service import served

SAMPLE = SampleInput.model_validate(
    {"task_name": "math", "messages": [{"role": "user", "content": "How many pens are in 130 boxes of 24?"}]}
)
ARGUMENTS = json.dumps({"expression": "24 * 130"})
CALL = {"id": "c1", "type": "function", "function": {"name": "calculator", "arguments": ARGUMENTS}}
FINAL = {"id": "c2", "type": "function", "function": {"name": "final_answer", "arguments": '{"answer": "3120"}'}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
ENDED = {"role": "assistant", "content": "3120"}


class ScriptedModels:
    """Chat completions and the Responses API: a call of the tool, then the answer."""

    def __init__(self) -> None:
        self.chats: list[Any] = []
        self.responses: list[Any] = []
        self.keys: set[str] = set()
        self.last: dict[str, Any] = ENDED
        self.app = FastAPI()
        self.app.post("/v1/chat/completions")(self.chat)
        self.app.post("/v1/responses")(self.respond)

    async def chat(self, request: Request) -> Any:
        self.keys.add(request.headers["authorization"])
        self.chats.append(await request.json())
        message = CALLED if len(self.chats) == 1 else self.last
        choice: dict[str, Any] = {"index": 0, "finish_reason": "tool_calls" if message.get("tool_calls") else "stop"}
        answer = {"id": "chatcmpl-1", "created": 1, "model": "any"}
        if self.chats[-1].get("stream"):
            calls = [{"index": place, **call} for place, call in enumerate(message.get("tool_calls") or [])]
            delta = {**message, "tool_calls": calls} if calls else message
            events = [{**choice, "finish_reason": None, "delta": delta}, {**choice, "delta": {}}]
            return StreamingResponse(chunks(answer, events), media_type="text/event-stream")
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        return {**answer, "object": "chat.completion", "choices": [{**choice, "message": message}], "usage": usage}

    async def respond(self, request: Request) -> Any:
        self.keys.add(request.headers["authorization"])
        self.responses.append(await request.json())
        call = {"type": "function_call", "id": "f1", "call_id": "c1", "name": "calculator", "arguments": ARGUMENTS}
        text = {"type": "output_text", "text": "3120", "annotations": []}
        said = {"type": "message", "id": "m1", "role": "assistant", "status": "completed", "content": [text]}
        return {
            "id": f"resp_{len(self.responses)}",
            "object": "response",
            "created_at": 1,
            "model": "any",
            "output": [call if len(self.responses) == 1 else said],
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
        }


async def chunks(answer: dict[str, Any], choices: list[dict[str, Any]]) -> Any:
    for choice in choices:
        yield f"data: {json.dumps({**answer, 'object': 'chat.completion.chunk', 'choices': [choice]})}\n\n"
    yield "data: [DONE]\n\n"


@pytest.fixture
def models() -> ScriptedModels:
    return ScriptedModels()


@pytest.fixture
def base_url(models: ScriptedModels) -> Iterator[str]:
    with served(models.app) as url:
        yield f"{url}/v1"


def test_the_agents_sdk_calls_its_tool_by_the_responses_api(models: ScriptedModels, base_url: str) -> None:
    asyncio.run(agents_sdk.agent(base_url, "session-key", SAMPLE))
    first, second = models.responses
    assert [item.get("type", item.get("role")) for item in second["input"]] == [
        "user",
        "function_call",
        "function_call_output",
    ]
    assert second["input"][-1]["output"] == "3120"
    assert [tool["name"] for tool in first["tools"]] == ["calculator"]
    assert (models.keys, models.chats) == ({"Bearer session-key"}, [])


@pytest.mark.parametrize(("agent", "streams"), [(agents_sdk.chat_agent, True), (langgraph_agent.agent, False)])
def test_an_agent_calls_its_tool_by_chat(models: ScriptedModels, base_url: str, agent: Any, streams: bool) -> None:
    asyncio.run(agent(base_url, "session-key", SAMPLE))
    first, second = models.chats
    assert [message["role"] for message in second["messages"]] == ["user", "assistant", "tool"]
    assert second["messages"][-1]["content"] == "3120"
    assert (bool(first.get("stream")), models.keys, models.responses) == (streams, {"Bearer session-key"}, [])


def test_smolagents_ends_with_a_call_of_its_own_tool(models: ScriptedModels, base_url: str) -> None:
    models.last = {**CALLED, "tool_calls": [FINAL]}
    asyncio.run(smolagents_agent.agent(base_url, "session-key", SAMPLE))
    assert len(models.chats) == 2
    assert [tool["function"]["name"] for tool in models.chats[0]["tools"]] == ["calculator", "final_answer"]
    assert "3120" in json.dumps(models.chats[1]["messages"][-1])


@pytest.mark.parametrize("agent", [agents_sdk.agent, agents_sdk.chat_agent, langgraph_agent.agent])
def test_vllm_reads_what_the_frameworks_send(models: ScriptedModels, base_url: str, agent: Any) -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    asyncio.run(agent(base_url, "key", SAMPLE))
    if models.responses:
        assert [len(ResponsesRequest.model_validate(body).input) for body in models.responses] == [1, 3]
    else:
        assert [len(ChatCompletionRequest.model_validate(body).messages) for body in models.chats] == [1, 3]
