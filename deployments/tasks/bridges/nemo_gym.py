"""A resources server of NeMo-Gym, over HTTP: its tools, and its verification at the end. One session a rollout.

The other half is the part of an agent of NeMo-Gym (`responses_api_agents/simple_agent`): it seeds a session, posts each
call to the tool's route, and posts the whole response to be verified, with the cookies of the session throughout.
"""

import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import httpx
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, HttpUrl, TypeAdapter, ValidationError

from deployments.tasks.support import read_records
from deployments.tasks.tool_set import tool_message
from rollout_env import ChatMessage, LostSession, Session, StartOutcome, StepOutcome, TaskEnvironment, TemporaryFailure
from rollout_env.loopback import is_loopback
from rollout_env.tool_calls import AnyCall, MalformedCall, ToolCall, reply_text, tool_calls_of

MODEL = "policy"
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""Function names of the Responses API. A sample names its tools, and other names could be paths of the server."""
OTHER_ROUTES = frozenset({"seed_session", "verify", "aggregate_metrics", "docs", "redoc"})
"""Routes of every resources server that are not tools."""
SYSTEM_ROLES = ("system", "developer")
REWARD = TypeAdapter(FiniteFloat)


class NeMoGymInfo(BaseModel):
    """The `extra_env_info` of a sample: a row of a data set of the server. Its further fields go to the server."""

    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True)

    responses_create_params: dict[str, Any]
    """The request in the form of OpenAI's Responses API: `input` and `tools`."""


class VerificationRefused(Exception):
    """The server could not verify a response, or answered something else than a reward."""


class NeMoGymEnvironment(TaskEnvironment):
    """Each tool call is answered by the server. A response without a call is verified, and ends the rollout."""

    description: ClassVar[str] = "A resources server of NeMo-Gym."
    ExtraEnvInfo: ClassVar[type[BaseModel]] = NeMoGymInfo

    def __init__(
        self,
        url: HttpUrl,
        rows: str,
        max_steps: Annotated[int, Field(ge=1)] | None = None,
        result_role: Literal["tool", "user"] = "tool",
        lost_session: LostSession = "restart",
        max_sessions: Annotated[int, Field(ge=1)] | None = None,
    ) -> None:
        """Reads the rows.

        Args:
            url: of the resources server.
            rows: path of a JSONL file with rows of its data set: the example samples. The chat template gets the tools
                of its first row, for all samples without `tools` of their own.
            max_steps: maximum of responses; the last of them is verified with its calls. Without it only a response
                without a call is verified.
            result_role: of the messages with results; `user` for a chat template that does not know `tool`.
            lost_session: `fail` for a server whose sessions cannot be had twice.
            max_sessions: how many sessions one replica holds at once.

        Raises:
            ValueError: the file has no rows, or an invalid one.
        """
        self.url = str(url).rstrip("/")
        self.max_steps = max_steps
        self.result_role = result_role
        self.lost_session = lost_session
        self.max_sessions = max_sessions
        self.ssl = httpx.create_ssl_context()
        """Shared by all sessions, because making one blocks the event loop for tens of milliseconds."""
        self._rows = [row.model_dump() for row in read_records(Path(rows), NeMoGymInfo)]
        if not self._rows:
            raise ValueError(f"{rows} has no rows")
        self.tools = [_chat_tool(tool) for tool in _tools_of(NeMoGymInfo.model_validate(self._rows[0]))]

    def start(self, message_log: list[ChatMessage], extra_env_info: NeMoGymInfo) -> StartOutcome:
        """Adds the input of the row, unless the sample has messages of its own."""
        if message_log:
            return StartOutcome()
        given = extra_env_info.responses_create_params.get("input", [])
        messages = [{"role": "user", "content": given}] if isinstance(given, str) else given
        return StartOutcome(observation=[_chat_message(message) for message in messages])

    async def open_session(self, message_log: list[ChatMessage], extra_env_info: NeMoGymInfo) -> Session:  # noqa: ARG002
        """Seeds a session. Raises `TemporaryFailure` if the server cannot be reached."""
        session = _NeMoGymSession(self, extra_env_info)
        try:
            await session.seed()
        except BaseException:
            await session.close()
            raise
        return session

    def example_samples(self, count: int, seed: int) -> list[dict[str, Any]]:
        """Rows in an order that the seed makes; the same ones again, numbered, if there are too few."""
        order = list(range(len(self._rows)))
        random.Random(seed).shuffle(order)
        samples: list[dict[str, Any]] = []
        for number in range(count):
            again, place = divmod(number, len(order))
            row = self._rows[order[place]]
            samples.append({"extra_env_info": {**row, "repetition": again} if again else row})
        return samples


class _NeMoGymSession(Session):
    """The cookies of one session, and what the model has answered in it."""

    def __init__(self, task: NeMoGymEnvironment, info: NeMoGymInfo) -> None:
        self._task = task
        self._row = info.model_dump()
        self._tools = _tools_of(info)
        self._names = {str(tool.get("name")) for tool in self._tools} - OTHER_ROUTES
        self._output: list[dict[str, Any]] = []
        """The items of the response so far: messages, calls and their results."""
        self._steps = 0
        self._client = httpx.AsyncClient(
            base_url=task.url, timeout=None, verify=task.ssl, trust_env=not is_loopback(task.url)
        )

    async def seed(self) -> None:
        (await self._posted("/seed_session", self._row)).raise_for_status()

    async def step(self, message_log: list[ChatMessage], extra_env_info: NeMoGymInfo) -> StepOutcome:  # noqa: ARG002
        """Makes the calls of the response in their order, or has it verified.

        Raises:
            TemporaryFailure: the server cannot be reached.
            VerificationRefused: it does not verify the response.
        """
        response = message_log[-1]
        self._steps += 1
        self._add_response(response)
        calls = tool_calls_of(response, self._tools)
        results = [await self._result(place, call) for place, call in enumerate(calls)]
        is_last = not calls or self._steps == self._task.max_steps
        reward = await self._verified() if is_last else 0.0
        return StepOutcome(results or None, reward, is_last, answer=None if calls else reply_text(response))

    def _add_response(self, response: ChatMessage) -> None:
        if thought := response.get("reasoning_content"):
            summary = [{"type": "summary_text", "text": thought}]
            self._output.append({"type": "reasoning", "id": f"rs_{self._steps}", "summary": summary})
        text = response.get("parsed_content") or ("" if response.get("tool_calls") else response["content"])
        if text:
            content = [{"type": "output_text", "text": text, "annotations": []}]
            message = {"type": "message", "id": f"msg_{self._steps}", "role": "assistant", "status": "completed"}
            self._output.append({**message, "content": content})

    async def _result(self, place: int, call: AnyCall) -> ChatMessage:
        call = replace(call, id=call.id or f"call_{self._steps}_{place}")
        if isinstance(call, MalformedCall):
            return tool_message(
                json.dumps({"error": f"Invalid tool call: {call.problem}"}), call, self._task.result_role
            )
        arguments = json.dumps(call.arguments)
        item = {"type": "function_call", "id": call.id, "status": "completed", "name": call.name}
        self._output.append({**item, "call_id": call.id, "arguments": arguments})
        text = await self._called(call)
        self._output.append({"type": "function_call_output", "call_id": call.id, "output": text})
        return tool_message(text, call, self._task.result_role)

    async def _called(self, call: ToolCall) -> str:
        """The answer of the tool's route, errors included, for the model. Other routes are not called."""
        if call.name not in self._names or NAME.fullmatch(call.name) is None:
            return json.dumps({"error": f"There is no tool {call.name}; there is {', '.join(sorted(self._names))}."})
        return (await self._posted(f"/{call.name}", call.arguments)).text

    async def _verified(self) -> float:
        """The reward of the whole response, which the server makes of its objectives."""
        response = {
            "id": "resp_1",
            "created_at": 0.0,
            "model": MODEL,
            "object": "response",
            "output": self._output,
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": self._tools,
        }
        answer = await self._posted("/verify", {**self._row, "response": response})
        try:
            return REWARD.validate_python(answer.raise_for_status().json()["reward"])
        except (httpx.HTTPStatusError, ValueError, LookupError, ValidationError) as error:
            raise VerificationRefused(
                f"{self._task.url}/verify answered {answer.status_code}: {answer.text[:500]}"
            ) from error

    async def _posted(self, path: str, body: Any) -> httpx.Response:
        """Raises `TemporaryFailure` if the server cannot be reached."""
        try:
            return await self._client.post(path, json=body)
        except httpx.TransportError as error:
            raise TemporaryFailure(f"The NeMo-Gym server at {self._task.url} does not answer: {error!r}") from error

    async def close(self) -> None:
        await self._client.aclose()


def _tools_of(info: NeMoGymInfo) -> list[dict[str, Any]]:
    """The functions of the row; tools of other types are the model provider's."""
    tools = info.responses_create_params.get("tools") or []
    return [tool for tool in tools if tool.get("type") == "function"]


def _chat_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """The tool as chat templates expect it."""
    described = {name: tool[name] for name in ("name", "description", "parameters") if name in tool}
    return {"type": "function", "function": described}


def _chat_message(message: dict[str, Any]) -> ChatMessage:
    content = message["content"]
    text = content if isinstance(content, str) else "\n".join(part.get("text", "") for part in content)
    return {"role": "system" if message["role"] in SYSTEM_ROLES else message["role"], "content": text}
