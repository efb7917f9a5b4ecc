"""Commands in the sandboxes of running rollouts over HTTP, for a harness on the same machine.

    POST /KEY/exec   {"argv", "environment"?, "cwd"?, "stdin"?, "timeout_s"?}: {"exit_code", "stdout", "stderr"}

Guarantees: it listens on loopback alone; the key is drawn for one run and is worth nothing after it; commands that last
beyond their run are ended with it, so that nothing is done for an agent while the verifier judges.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict

from pydantic import Field, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from deployments.agents.programs import AgentCall
from deployments.sandbox.interface import SandboxLost
from deployments.sandbox.providers.interface import ExecResult, ExecTimedOut, OutOfMemory, RunningSandbox, read_bounded
from deployments.strict_settings import StrictSettings
from rollout_env.loopback import LoopbackServer
from rollout_env.serve import Disconnected, while_connected

ENDED = "There is no run with this sandbox: it has ended."
LARGEST_BODY_BYTES = 64 * 2**20


class _BodyTooLarge(Exception):
    """The body has more bytes than a request may have."""


class HarnessCall(AgentCall):
    """The arguments of a run in a sandbox."""

    sandbox: str
    """Address of the sandbox, for as long as the run lasts."""


class _ExecBody(StrictSettings):
    """A command, as `RunningSandbox.exec` takes it."""

    argv: list[str] = Field(min_length=1)
    environment: dict[str, str] = Field(default_factory=dict)
    cwd: str | None = None
    stdin: str = ""
    timeout_s: float | None = Field(default=None, gt=0)


class SandboxEndpoint:
    """Serves sandboxes while their runs last. The server starts with the first of them."""

    def __init__(self) -> None:
        self._server = LoopbackServer(Starlette(routes=[Route("/{key}/exec", self._exec, methods=["POST"])]))
        self._starting: asyncio.Future[str] | None = None
        self._open: dict[str, tuple[RunningSandbox, set[asyncio.Future[ExecResult]]]] = {}

    @asynccontextmanager
    async def opened(self, sandbox: RunningSandbox) -> AsyncIterator[str]:
        """Yields the address of the sandbox, which is served for the length of the block."""
        if self._starting is None:
            self._starting = asyncio.ensure_future(self._server.start())
        url, key = await asyncio.shield(self._starting), secrets.token_urlsafe()
        running: set[asyncio.Future[ExecResult]] = set()
        self._open[key] = sandbox, running
        try:
            yield f"{url}/{key}"
        finally:
            del self._open[key]
            for command in running:
                command.cancel()
            if running:
                await asyncio.wait(running)

    def close(self) -> None:
        self._server.should_exit = True

    async def _exec(self, request: Request) -> Response:
        try:
            excess = _BodyTooLarge(f"The body has more than {LARGEST_BODY_BYTES} bytes.")
            body = await read_bounded(request.stream(), LARGEST_BODY_BYTES, excess)
            asked = _ExecBody.model_validate_json(body)
            sandbox, running = self._open[request.path_params["key"]]
            given = asked.model_dump(exclude={"argv"}) | {"stdin": asked.stdin.encode()}
            command = asyncio.ensure_future(sandbox.exec(asked.argv, **given))
            running.add(command)
            command.add_done_callback(running.discard)
            return JSONResponse(asdict(await while_connected(request, command)))
        except (_BodyTooLarge, ValidationError) as error:
            return PlainTextResponse(str(error), 422)
        except ExecTimedOut as error:
            return PlainTextResponse(str(error), 408)
        except (SandboxLost, OutOfMemory) as error:
            return PlainTextResponse(str(error), 410)
        except (KeyError, Disconnected, asyncio.CancelledError):
            return PlainTextResponse(ENDED, 410)
