"""An MCP server's tools, over standard input and output or HTTP, by the official client. One connection a rollout."""

import asyncio
import random
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from deployments.tasks.bridges.mcp_connection import ConnectionThread, McpConnection, McpServer, listed_tools
from deployments.tasks.replies import boxed_or_whole
from deployments.tasks.tool_calls import tool_message
from rollout_env import ChatMessage, LostSession, Session, StepOutcome, TaskEnvironment
from rollout_env.tool_calls import AnyCall, MalformedCall, reply_text, tool_calls_of


class McpInfo(BaseModel):
    """The `extra_env_info` of a sample; further fields are ignored."""

    model_config = ConfigDict(extra="ignore", use_attribute_docstrings=True)

    ground_truth: str | None = None
    """The right answer. Without one every answer is worth 0."""


class McpEnvironment(TaskEnvironment):
    """Each tool call of a response is answered by the server. A response without a call is the answer.

    A class that is derived from this one may judge answers otherwise: see `reward_of`.
    """

    description: ClassVar[str] = "Questions to be answered with the tools of an MCP server."
    ExtraEnvInfo: ClassVar[type[BaseModel]] = McpInfo

    def __init__(
        self,
        server: McpServer,
        tools: list[str] | None = None,
        call_timeout_s: Annotated[float, Field(gt=0)] = 60.0,
        lost_session: LostSession = "restart",
        max_sessions: Annotated[int, Field(ge=1)] | None = None,
    ) -> None:
        """Asks the server for its tools.

        Args:
            server: where it is.
            tools: those that the model may call; by default all.
            call_timeout_s: seconds after which a call has failed, which the model is told.
            lost_session: `reopen` goes on over a new connection, for servers that hold nothing for a connection.
            max_sessions: how many connections one replica holds at once.

        Raises:
            PackageMissing: the package `mcp` is not installed.
            ToolsNotListed: the server's list of tools has no end, or it refuses a page of it.
            ValueError: the server has no such tool.
            TemporaryFailure: it does not answer.
        """
        self.server = server
        self.call_timeout_s = call_timeout_s
        self.lost_session = lost_session
        self.max_sessions = max_sessions
        self.connections = ConnectionThread()
        try:
            known = {tool.name: tool for tool in self.connections.start(listed_tools(server, call_timeout_s)).result()}
        except BaseException:
            self.connections.stop()
            raise
        names = list(known) if tools is None else tools
        if unknown := [name for name in names if name not in known]:
            raise ValueError(f"the server has no tools {', '.join(unknown)}; it has {', '.join(known)}")
        self.tools = [_schema_of(known[name]) for name in names]
        self.names = frozenset(names)

    async def open_session(self, message_log: list[ChatMessage], extra_env_info: McpInfo) -> Session:  # noqa: ARG002
        opening = McpConnection.open(self.server, self.call_timeout_s)
        return _McpSession(self, await self.connections.run(opening))

    def close(self) -> None:
        self.connections.stop()

    def reward_of(self, answer: str, extra_env_info: McpInfo) -> float | dict[str, float]:
        """Judges an answer: what is in the last box of the response, or else the whole of it."""
        return float(answer != "" and answer == (extra_env_info.ground_truth or "").strip())

    def example_samples(self, count: int, seed: int) -> list[dict[str, Any]]:
        """Prompts that name a tool. A data set of the task has better ones."""
        names = sorted(self.names) or ["none"]
        first = random.Random(seed).randrange(2**30)
        prompts = (f"What does {names[number % len(names)]} give for {first + number}?" for number in range(count))
        return [{"messages": [{"role": "user", "content": prompt}], "extra_env_info": {}} for prompt in prompts]


class _McpSession(Session):
    """The connection of one rollout."""

    def __init__(self, task: McpEnvironment, connection: McpConnection) -> None:
        self._task = task
        self._connection = connection

    async def step(self, message_log: list[ChatMessage], extra_env_info: McpInfo) -> StepOutcome:
        """Makes the calls of the response at once.

        Raises:
            TemporaryFailure: the connection broke.
        """
        response = message_log[-1]
        calls = tool_calls_of(response, self._task.tools)
        if not calls:
            answer = boxed_or_whole(reply_text(response))
            reward = self._task.reward_of(answer, extra_env_info)
            return StepOutcome(None, reward, terminated=True, answer=answer)
        results = await asyncio.gather(*map(self._result, calls))
        messages = [tool_message(text, call) for call, text in zip(calls, results, strict=True)]
        return StepOutcome(messages, 0.0, terminated=False)

    async def _result(self, call: AnyCall) -> str:
        if isinstance(call, MalformedCall):
            return f"Error: {call.problem}"
        if call.name not in self._task.names:
            return f"Error: there is no tool {call.name}. There is {', '.join(sorted(self._task.names))}."
        return await self._task.connections.run(self._connection.call(call.name, call.arguments))

    async def close(self) -> None:
        await self._task.connections.run(self._connection.close())


def _schema_of(tool: Any) -> dict[str, Any]:
    """The tool as chat templates expect it."""
    described = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
    return {"type": "function", "function": described}
