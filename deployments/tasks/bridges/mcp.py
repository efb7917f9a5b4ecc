"""An MCP server's tools, over standard input and output or HTTP, by the official client. One connection a rollout.

All connections of an environment live in a thread of their own.
"""

import asyncio
import concurrent.futures
import json
import logging
import random
import shlex
import sys
import threading
from collections.abc import Awaitable, Coroutine
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, HttpUrl, ValidationError, model_validator

from deployments.tasks.replies import boxed_or_whole
from deployments.tasks.support import imported
from deployments.tasks.tool_calls import tool_message
from rollout_env import ChatMessage, LostSession, Session, StepOutcome, TaskEnvironment, TemporaryFailure
from rollout_env.tool_calls import AnyCall, MalformedCall, reply_text, tool_calls_of

_CONNECTION_CLOSED = -32000
"""MCP's code for a connection that ended during a call."""
_Result = TypeVar("_Result")
_OPEN_TIMEOUT_S = 60.0
"""Time limit for a server to start and answer, and again to list its tools."""
_MOST_TOOLS = 1000
"""Bound of a server's list of tools, which may never end."""
_LONGEST_PROBLEM = 500
"""Characters of what is wrong with an answer: it may quote all of it."""


class _McpServer(BaseModel):
    """A server's `url`, or a `command` that starts one for each rollout."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    url: HttpUrl | None = None
    """Address of a server over streamable HTTP."""
    command: str | None = None
    """Program of a server that speaks over its standard input and output."""
    args: list[str] = Field(default_factory=list)
    """Arguments of the command."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the command, besides a few safe ones."""
    cwd: str | None = None
    """The working directory of the command."""

    @model_validator(mode="after")
    def is_one_of_both(self) -> "_McpServer":
        if (self.url is None) == (self.command is None):
            raise ValueError("give either a url or a command")
        return self

    def __str__(self) -> str:
        return str(self.url) if self.command is None else shlex.join([self.command, *self.args])

    def target(self) -> Any:
        """The argument of the official client."""
        if self.url is not None:
            return str(self.url)
        parameters = imported("mcp", "mcp").StdioServerParameters
        return parameters(command=self.command, args=self.args, env=self.env, cwd=self.cwd)


class _McpConnection:
    """A connection to a server, in its own task, because the client must be exited by the task that entered it."""

    def __init__(self, server: _McpServer, call_timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        self.client: Any = None
        self._call_timeout_s = call_timeout_s
        self._opened: asyncio.Future[None] = loop.create_future()
        self._closing = asyncio.Event()
        self._task = loop.create_task(self._live(server))

    @classmethod
    async def open(cls, server: _McpServer, call_timeout_s: float) -> "_McpConnection":
        """Raises `TemporaryFailure` if the server cannot be reached."""
        connection = cls(server, call_timeout_s)
        try:
            async with asyncio.timeout(_OPEN_TIMEOUT_S):
                await asyncio.shield(connection._opened)
        except BaseException as error:
            await connection.close()
            if isinstance(error, TimeoutError):
                raise TemporaryFailure(f"The MCP server did not answer within {_OPEN_TIMEOUT_S:g} s.") from error
            raise
        return connection

    async def tools(self) -> list[Any]:
        """All pages of the server's list.

        Raises:
            ValueError: the list has too many tools, or the server refuses a page of it.
            TemporaryFailure: the connection broke.
        """
        found: list[Any] = []
        cursor: str | None = None
        while len(found) <= _MOST_TOOLS:
            page = await self._answer(self.client.list_tools(cursor=cursor))
            if isinstance(page, str):
                raise ValueError(f"a page is refused: {page}")
            found += page.tools
            if (cursor := page.next_cursor) is None:
                return found
        raise ValueError(f"there are more than {_MOST_TOOLS}")

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """The result of a call as text, also of one that failed or that breaks the protocol.

        Raises:
            TemporaryFailure: the connection broke.
        """
        result = await self._answer(self.client.call_tool(name, arguments, read_timeout_seconds=self._call_timeout_s))
        if isinstance(result, str):
            return f"Error: {result}"
        return f"Error: {_text_of(result)}" if result.is_error else _text_of(result)

    async def _answer(self, request: Awaitable[Any]) -> Any:
        """The result; a message, as a text, where the server answers with an error, or with what breaks the protocol.

        Raises:
            TemporaryFailure: the connection broke.
        """
        try:
            return await request
        except imported("mcp", "mcp").MCPError as error:
            if error.error.code == _CONNECTION_CLOSED or self._task.done():
                raise TemporaryFailure(f"The connection to the MCP server broke: {error.error.message}") from error
            return str(error.error.message)
        except Exception as error:
            # The client raises anything on what a server answers.
            if self._task.done():
                raise TemporaryFailure(f"The connection to the MCP server broke: {error}") from error
            return _problem_of(error)

    async def close(self) -> None:
        """Ends the connection and a server that was started for it; ignores what that raises."""
        self._closing.set()
        await asyncio.wait([self._task])
        if not self._task.cancelled():
            self._task.exception()

    async def _live(self, server: _McpServer) -> None:
        try:
            async with imported("mcp", "mcp").Client(server.target()) as client:
                self.client = client
                self._opened.set_result(None)
                await self._closing.wait()
        except Exception as error:
            if self._opened.done():
                raise
            failure = TemporaryFailure(f"The MCP server cannot be reached: {_innermost(error)}")
            failure.__cause__ = error
            self._opened.set_exception(failure)


def _problem_of(error: Exception) -> str:
    """A sentence about an answer that breaks MCP's schema or the one that its tool gives for its results."""
    if not isinstance(error, ValidationError):
        said = str(error).partition("\n\n")[0] or type(error).__name__
        return f"The server's answer is not valid: {said}"[:_LONGEST_PROBLEM]
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    place = first["loc"][:2]
    # Behind the place of a block of content come the kinds that it is none of.
    is_block = len(first["loc"]) > 2 and place[0] == "content"
    said = "this is no block of content that MCP knows" if is_block else first["msg"]
    return f"The server's answer breaks MCP's schema: {'.'.join(map(str, place))}: {said}."[:_LONGEST_PROBLEM]


def _innermost(error: BaseException) -> BaseException:
    """The first exception of a group of groups: the client raises all of its own in groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def _listed_tools(server: _McpServer, call_timeout_s: float) -> list[Any]:
    """The tools of the server, over a connection that is closed afterwards.

    Raises:
        ValueError: the list has no end, or the server refuses a page of it.
        TemporaryFailure: the server does not answer.
    """
    connection = await _McpConnection.open(server, call_timeout_s)
    try:
        async with asyncio.timeout(_OPEN_TIMEOUT_S):
            return await connection.tools()
    except TimeoutError as error:
        raise TemporaryFailure(f"The MCP server {server} listed no tools within {_OPEN_TIMEOUT_S:g} s.") from error
    except ValueError as error:
        raise ValueError(f"The MCP server {server} does not list its tools: {error}.") from error
    finally:
        await connection.close()


def _let_loops_start_processes() -> None:
    """Gives this process a watcher by which Python's own event loop notices the end of a process that it started.

    uvloop's policy, that of a replica, has none: Python's own loop then starts no process. Needed with uvloop 0.23 and
    Python up to 3.13; Python 3.14 has no watchers, and needs none.
    """
    if sys.version_info >= (3, 14):
        return
    policy: Any = asyncio.get_event_loop_policy()
    try:
        policy.get_child_watcher()
    except NotImplementedError:
        watcher = asyncio.ThreadedChildWatcher()
        policy.get_child_watcher = lambda: watcher


def _is_no_printed_line(record: logging.LogRecord) -> bool:
    """False for the traceback that the official client logs of each line that a server prints beside its messages."""
    return record.getMessage() != "Failed to parse JSONRPC message from server"


class _ConnectionThread:
    """The event loop of all connections of an environment, in a thread of its own.

    It is Python's own loop, which starts a server by `vfork`. A replica's event loop is uvloop, which forks, and a fork
    of a process that uses gRPC may crash before it executes the server.
    """

    def __init__(self) -> None:
        _let_loops_start_processes()
        logging.getLogger("mcp.client.stdio").addFilter(_is_no_printed_line)
        self._loop = asyncio.SelectorEventLoop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="MCP connections", daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, _Result]) -> "concurrent.futures.Future[_Result]":
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def run(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Raises what the work raises. Cancelling this cancels the work."""
        return await asyncio.wrap_future(self.start(work))

    def stop(self) -> None:
        """Ends the thread; the sessions are closed before."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _text_of(result: Any) -> str:
    """The parts of a result as text; its structured content as JSON where no part has a text that is not blank."""
    # An embedded resource is a text or a blob.
    texts = [getattr(getattr(block, "resource", block), "text", None) for block in result.content]
    parts = [_name_of(block) if text is None else text for block, text in zip(result.content, texts, strict=True)]
    if result.structured_content is None or any(text and not text.isspace() for text in texts):
        return "\n".join(parts)
    shown = [part for part in parts if part and not part.isspace()]
    return "\n".join([*shown, json.dumps(result.structured_content, ensure_ascii=False)])


def _name_of(block: Any) -> str:
    """The type of a part that is not a text, and its place and media type as far as it has them."""
    known = [getattr(getattr(block, "resource", block), field, None) for field in ("uri", "mime_type")]
    return f"({' '.join(filter(None, [block.type, *known]))})"


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
        server: _McpServer,
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
            ValueError: the server has no such tool, its list of tools has no end, or it refuses a page of it.
            TemporaryFailure: it does not answer.
        """
        self.server = server
        self.call_timeout_s = call_timeout_s
        self.lost_session = lost_session
        self.max_sessions = max_sessions
        self.connections = _ConnectionThread()
        try:
            known = {tool.name: tool for tool in self.connections.start(_listed_tools(server, call_timeout_s)).result()}
        except BaseException:
            self.connections.stop()
            raise
        names = list(known) if tools is None else tools
        if unknown := [name for name in names if name not in known]:
            raise ValueError(f"the server has no tools {', '.join(unknown)}; it has {', '.join(known)}")
        self.tools = [_schema_of(known[name]) for name in names]
        self.names = frozenset(names)

    async def open_session(self, message_log: list[ChatMessage], extra_env_info: McpInfo) -> Session:  # noqa: ARG002
        return _McpSession(self, await self.connections.run(_McpConnection.open(self.server, self.call_timeout_s)))

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

    def __init__(self, task: McpEnvironment, connection: _McpConnection) -> None:
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
            return StepOutcome(None, self._task.reward_of(answer, extra_env_info), terminated=True, answer=answer)
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
