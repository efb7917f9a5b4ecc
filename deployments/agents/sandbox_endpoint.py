"""The sandboxes of running rollouts over HTTP, for a harness on the same machine.

    POST /KEY/exec          {"argv", "environment"?, "cwd"?, "stdin"?, "timeout_s"?}: {"exit_code", "stdout", "stderr"}
    GET  /KEY/files?path=   the content of the file; 404 if there is none
    PUT  /KEY/files?path=   writes the body to the file, with `&executable=true` as a program

Guarantees: it listens on loopback alone; the key is drawn for one run and is worth nothing after it; calls that last
beyond their run are ended with it, so that nothing is done for an agent while the verifier judges.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Annotated

from pydantic import Field, StringConstraints, TypeAdapter, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from deployments.agents.programs import AgentCall
from deployments.environments.bridges.model_endpoint import EndpointServer
from deployments.sandbox.interface import SandboxLost
from deployments.sandbox.providers.interface import (
    ExecTimedOut,
    OutOfMemory,
    RunningSandbox,
    SandboxFile,
    SandboxRefused,
)
from deployments.sandbox.server import BodyTooLarge, CallerDisconnected, body_of, while_connected
from deployments.strict_settings import StrictSettings

STATUSES: dict[type[Exception], int] = {
    ExecTimedOut: 408,
    SandboxLost: 410,
    OutOfMemory: 410,
    BodyTooLarge: 413,
    ValidationError: 422,
    SandboxRefused: 422,
}
PATH: TypeAdapter[str] = TypeAdapter(Annotated[str, StringConstraints(pattern="^/")])


class HarnessCall(AgentCall):
    """The arguments of a run in a sandbox."""

    sandbox: str
    """Address of the sandbox, for as long as the run lasts."""


class ExecBody(StrictSettings):
    """A command, as `RunningSandbox.exec` takes it."""

    argv: list[str] = Field(min_length=1)
    environment: dict[str, str] = Field(default_factory=dict)
    cwd: str | None = None
    stdin: str = ""
    timeout_s: float | None = Field(default=None, gt=0)


class SandboxEndpoint:
    """Serves sandboxes while their runs last. The server starts with the first of them."""

    def __init__(self) -> None:
        routes = [
            Route("/{key}/exec", self._call, methods=["POST"]),
            Route("/{key}/files", self._call, methods=["GET", "PUT"]),
        ]
        handlers = {kind: answer_with(status) for kind, status in STATUSES.items()}
        self._server = EndpointServer(Starlette(routes=routes, exception_handlers=handlers))
        self._starting: asyncio.Future[str] | None = None
        self._open: dict[str, tuple[RunningSandbox, set[asyncio.Future[Response]]]] = {}

    @asynccontextmanager
    async def opened(self, sandbox: RunningSandbox) -> AsyncIterator[str]:
        """Yields the address of the sandbox, which is served for the length of the block."""
        if self._starting is None:
            self._starting = asyncio.ensure_future(self._server.start())
        url, key = await asyncio.shield(self._starting), secrets.token_urlsafe()
        calls: set[asyncio.Future[Response]] = set()
        self._open[key] = sandbox, calls
        try:
            yield f"{url}/{key}"
        finally:
            del self._open[key]
            for call in calls:
                call.cancel()
            if calls:
                await asyncio.wait(calls)

    def close(self) -> None:
        self._server.should_exit = True

    async def _call(self, request: Request) -> Response:
        body = await body_of(request)
        over = PlainTextResponse("There is no run with this sandbox: it has ended.", 410)
        if (opened := self._open.get(request.path_params["key"])) is None:
            return over
        sandbox, calls = opened
        call = asyncio.ensure_future(answered(sandbox, request, body))
        calls.add(call)
        call.add_done_callback(calls.discard)
        try:
            return await while_connected(request, call)
        except (CallerDisconnected, asyncio.CancelledError):
            return over


async def answered(sandbox: RunningSandbox, request: Request, body: bytes) -> Response:
    """Raises the kinds in `STATUSES`."""
    if request.method == "POST":
        asked = ExecBody.model_validate_json(body)
        done = await sandbox.exec(
            asked.argv,
            environment=asked.environment,
            cwd=asked.cwd,
            stdin=asked.stdin.encode(),
            timeout_s=asked.timeout_s,
        )
        return JSONResponse(asdict(done))
    path = PATH.validate_python(request.query_params.get("path"))
    if request.method == "PUT":
        file = SandboxFile(body, executable=request.query_params.get("executable") == "true")
        await sandbox.write_files({path: file})
        return Response(status_code=204)
    content = await sandbox.read_file(path)
    return PlainTextResponse(f"There is no file {path}.", 404) if content is None else Response(content)


def answer_with(status: int) -> Callable[[Request, Exception], Awaitable[Response]]:
    async def answer(_: Request, error: Exception) -> Response:
        return PlainTextResponse(str(error), status)

    return answer
