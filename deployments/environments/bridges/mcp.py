"""An MCP server's tools, over standard input and output or HTTP, by the official client. One connection a rollout."""

import asyncio
import concurrent.futures
import json
import random
import shlex
import threading
from collections.abc import Awaitable, Coroutine
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, HttpUrl, model_validator

from deployments.environments.bridges.support import imported
from deployments.environments.replies import last_box
from rollout_env import ChatMessage, LostSession, Session, StepOutcome, TaskEnvironment, TemporaryFailure
from rollout_env.tool_calls import AnyCall, MalformedCall, reply_text, tool_calls_of

CONNECTION_CLOSED = -32000
"""MCP's code for a connection that ended while a call was under way."""
Result = TypeVar("Result")
OPEN_TIMEOUT_S = 60.0
"""How long a server may take to start and to answer, and again to list its tools."""
MOST_PAGES, MOST_TOOLS = 100, 1000
"""Of a list of tools."""
MOST_CALLS_AT_ONCE = 16
"""In one response. Further ones are refused."""


class ToolsNotListed(ValueError):
    """The server gives no list of its tools that ends; the message names the server."""


class McpServer(BaseModel):
    """Where the server is: a `url`, or a `command` that starts one for each rollout."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    url: HttpUrl | None = None
    """Of a server over streamable HTTP."""
    command: str | None = None
    """Of a server that speaks over its standard input and output."""
    args: list[str] = Field(default_factory=list)
    """Of the command."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the command, beside a few that are safe."""
    cwd: str | None = None
    """The working directory of the command."""

    @model_validator(mode="after")
    def is_one_of_both(self) -> "McpServer":
        if (self.url is None) == (self.command is None):
            raise ValueError("give either a url or a command")
        return self

    def __str__(self) -> str:
        return str(self.url) if self.command is None else shlex.join([self.command, *self.args])

    def of_client(self) -> Any:
        """What the official client connects to."""
        if self.url is not None:
            return str(self.url)
        parameters = imported("mcp", "mcp").StdioServerParameters
        return parameters(command=self.command, args=self.args, env=self.env, cwd=self.cwd)


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
        result_role: Literal["tool", "user"] = "tool",
        call_timeout_s: Annotated[float, Field(gt=0)] = 60.0,
        lost_session: LostSession = "restart",
        max_sessions: Annotated[int, Field(ge=1)] | None = None,
    ) -> None:
        """Asks the server for its tools.

        Args:
            server: where it is.
            tools: those that the model may call; by default all.
            result_role: of the messages with results; `user` for a chat template that does not know `tool`.
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
        self.result_role = result_role
        self.call_timeout_s = call_timeout_s
        self.lost_session = lost_session
        self.max_sessions = max_sessions
        self.connections = ConnectionThread()
        try:
            known = {tool.name: tool for tool in self.connections.start(self._known_tools()).result()}
        except BaseException:
            self.connections.stop()
            raise
        names = list(known) if tools is None else tools
        if unknown := [name for name in names if name not in known]:
            raise ValueError(f"the server has no tools {', '.join(unknown)}; it has {', '.join(known)}")
        self.tools = [schema_of(known[name]) for name in names]
        self.names = frozenset(names)

    async def _known_tools(self) -> list[Any]:
        connection = await McpConnection.open(self.server, self.call_timeout_s)
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                return await connection.tools()
        except TimeoutError as error:
            raise TemporaryFailure(
                f"The MCP server {self.server} listed no tools within {OPEN_TIMEOUT_S:g} s."
            ) from error
        except ToolsNotListed as error:
            raise ToolsNotListed(f"The MCP server {self.server} does not list its tools: {error}.") from error
        finally:
            await connection.close()

    async def open_session(self, message_log: list[ChatMessage], extra_env_info: McpInfo) -> Session:  # noqa: ARG002
        opening = McpConnection.open(self.server, self.call_timeout_s)
        return McpSession(self, await self.connections.run(opening))

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


class McpSession(Session):
    """The connection of one rollout."""

    def __init__(self, task: McpEnvironment, connection: "McpConnection") -> None:
        self._task = task
        self._connection = connection

    async def step(self, message_log: list[ChatMessage], extra_env_info: McpInfo) -> StepOutcome:
        """Makes the calls of the response at once.

        Raises:
            TemporaryFailure: the connection broke.
        """
        response = message_log[-1]
        calls = tool_calls_of(response)
        if not calls:
            answer = answer_in(reply_text(response))
            reward = self._task.reward_of(answer, extra_env_info)
            return StepOutcome(None, reward, terminated=True, answer=answer)
        results = await asyncio.gather(*(self._result(place, call) for place, call in enumerate(calls)))
        messages = [self._message(call, text) for call, text in zip(calls, results, strict=True)]
        return StepOutcome(messages, 0.0, terminated=False)

    async def _result(self, place: int, call: AnyCall) -> str:
        if isinstance(call, MalformedCall):
            return f"Error: {call.problem}"
        if call.name not in self._task.names:
            return f"Error: there is no tool {call.name}. There is {', '.join(sorted(self._task.names))}."
        if place >= MOST_CALLS_AT_ONCE:
            return f"Error: one response may make {MOST_CALLS_AT_ONCE} calls."
        return await self._task.connections.run(self._connection.called(call.name, call.arguments))

    def _message(self, call: AnyCall, text: str) -> ChatMessage:
        message: ChatMessage = {"role": self._task.result_role, "content": text}
        if self._task.result_role == "tool":
            if call.name is not None:
                message["name"] = call.name
            if call.id is not None:
                message["tool_call_id"] = call.id
        return message

    async def close(self) -> None:
        await self._task.connections.run(self._connection.close())


class ConnectionThread:
    """The event loop of all connections of an environment, in a thread of its own.

    It is Python's own loop, which starts a server by `vfork`. A replica's event loop is uvloop, which forks, and a fork
    of a process that uses gRPC may crash before it runs the server.
    """

    def __init__(self) -> None:
        let_loops_start_processes()
        self._loop = asyncio.SelectorEventLoop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="MCP connections", daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, Result]) -> "concurrent.futures.Future[Result]":
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Raises what the work raises. Cancelling this cancels the work."""
        return await asyncio.wrap_future(self.start(work))

    def stop(self) -> None:
        """Ends the thread, and what still runs in it."""
        self.start(cancel_others()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class PolicyWithChildWatcher(asyncio.AbstractEventLoopPolicy):
    """Another policy, and a watcher by which Python's own event loop notices the end of a process that it started."""

    def __init__(self, policy: asyncio.AbstractEventLoopPolicy) -> None:
        self._policy = policy
        self._watcher = asyncio.ThreadedChildWatcher()

    def get_event_loop(self) -> asyncio.AbstractEventLoop:
        return self._policy.get_event_loop()

    def set_event_loop(self, loop: asyncio.AbstractEventLoop | None) -> None:
        self._policy.set_event_loop(loop)

    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        return self._policy.new_event_loop()

    def get_child_watcher(self) -> asyncio.AbstractChildWatcher:
        return self._watcher

    def set_child_watcher(self, watcher: asyncio.AbstractChildWatcher) -> None:
        self._policy.set_child_watcher(watcher)


def let_loops_start_processes() -> None:
    """Gives this process a child watcher, which uvloop's policy (that of a replica) does not have."""
    policy = asyncio.get_event_loop_policy()
    try:
        policy.get_child_watcher()
    except NotImplementedError:
        asyncio.set_event_loop_policy(PolicyWithChildWatcher(policy))


async def cancel_others() -> None:
    """Cancels all tasks of the loop but this one, and waits for them."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


class McpConnection:
    """A connection to a server. It lives in a task of its own, because the client must be left where it was entered."""

    def __init__(self, server: McpServer, call_timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        self.client: Any = None
        self._call_timeout_s = call_timeout_s
        self._opened: asyncio.Future[None] = loop.create_future()
        self._closing = asyncio.Event()
        self._task = loop.create_task(self._live(server))

    @classmethod
    async def open(cls, server: McpServer, call_timeout_s: float) -> "McpConnection":
        """Raises `TemporaryFailure` if the server cannot be reached."""
        connection = cls(server, call_timeout_s)
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                await asyncio.shield(connection._opened)
        except TimeoutError as error:
            await connection.close()
            raise TemporaryFailure(f"The MCP server did not answer within {OPEN_TIMEOUT_S:g} s.") from error
        except BaseException:
            await connection.close()
            raise
        return connection

    async def tools(self) -> list[Any]:
        """All pages of the server's list.

        Raises:
            ToolsNotListed: the list has no end, or the server refuses a page of it.
            TemporaryFailure: the connection broke.
        """
        found: list[Any] = []
        cursors: list[str | None] = [None]
        while len(cursors) <= MOST_PAGES:
            page = await self._answer(self.client.list_tools(cursor=cursors[-1]))
            if isinstance(page, str):
                raise ToolsNotListed(f"page {len(cursors)} is refused: {page}")
            found += page.tools
            if len(found) > MOST_TOOLS:
                raise ToolsNotListed(f"there are more than {MOST_TOOLS}")
            if page.next_cursor is None:
                return found
            if page.next_cursor in cursors:
                raise ToolsNotListed(f"page {len(cursors)} leads back to an earlier one, {page.next_cursor!r:.100}")
            cursors.append(page.next_cursor)
        raise ToolsNotListed(f"the list has more than {MOST_PAGES} pages")

    async def called(self, name: str, arguments: dict[str, Any]) -> str:
        """The result of a call as text, also of one that failed.

        Raises:
            TemporaryFailure: the connection broke.
        """
        result = await self._answer(self.client.call_tool(name, arguments, read_timeout_seconds=self._call_timeout_s))
        if isinstance(result, str):
            return f"Error: {result}"
        return f"Error: {text_of(result)}" if result.is_error else text_of(result)

    async def _answer(self, request: Awaitable[Any]) -> Any:
        """The result; the message, as a text, where the server answers with an error.

        Raises:
            TemporaryFailure: the connection broke.
        """
        try:
            return await request
        except imported("mcp", "mcp").MCPError as error:
            if error.error.code == CONNECTION_CLOSED or self._task.done():
                raise TemporaryFailure(f"The connection to the MCP server broke: {error.error.message}") from error
            return str(error.error.message)

    async def close(self) -> None:
        """Ends the connection, and a server that was started for it. What that raises is of no use any more."""
        self._closing.set()
        await asyncio.wait([self._task])
        if not self._task.cancelled():
            self._task.exception()

    async def _live(self, server: McpServer) -> None:
        try:
            async with imported("mcp", "mcp").Client(server.of_client()) as client:
                self.client = client
                self._opened.set_result(None)
                await self._closing.wait()
        except Exception as error:
            if self._opened.done():
                raise
            failure = TemporaryFailure(f"The MCP server cannot be reached: {innermost(error)}")
            failure.__cause__ = error
            self._opened.set_exception(failure)


def innermost(error: BaseException) -> BaseException:
    """The first exception of a group of groups: the client raises all of its own in groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def schema_of(tool: Any) -> dict[str, Any]:
    """The tool as chat templates expect it."""
    described = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
    return {"type": "function", "function": described}


def text_of(result: Any) -> str:
    """The parts of a result as text; its structured content as JSON where no part is a text."""
    # An embedded resource is a text or a blob.
    texts = [getattr(getattr(block, "resource", block), "text", None) for block in result.content]
    parts = [name_of(block) if text is None else text for block, text in zip(result.content, texts, strict=True)]
    if result.structured_content is not None and all(text is None for text in texts):
        parts.append(json.dumps(result.structured_content, ensure_ascii=False))
    return "\n".join(parts)


def name_of(block: Any) -> str:
    """The type of a part that is not a text, and its place and media type as far as it has them."""
    known = [getattr(getattr(block, "resource", block), field, None) for field in ("uri", "mime_type")]
    return f"({' '.join(filter(None, [block.type, *known]))})"


def answer_in(response: str) -> str:
    boxed = last_box(response)
    return (response if boxed is None else boxed).strip()
