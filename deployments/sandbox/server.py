"""Runs programs for other machines: `python -m deployments.sandbox.server`. `remote.py` is the caller's half.

The token is in the environment variable `ROLLOUT_SANDBOX_TOKEN`. Without one the server listens on loopback alone.
"""

import asyncio
import hmac
import os
from collections.abc import Awaitable
from dataclasses import asdict
from typing import Annotated, Any, TypeVar

import typer
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from deployments.sandbox.interface import ProgramRefused, Sandbox, SandboxLost
from deployments.sandbox.local import LocalSandbox
from deployments.sandbox.remote import TOKEN_VARIABLE, parsed_request

LARGEST_BODY_BYTES = 64 * 2**20
T = TypeVar("T")


class BodyTooLarge(Exception):
    """The body has more bytes than a request may have."""


class CallerDisconnected(Exception):
    """Nobody waits for the answer any longer."""


def build_app(sandbox: Sandbox, token: str) -> Starlette:
    """`POST /run`. An empty `token` lets everyone in."""

    async def run(request: Request) -> Response:
        given = request.headers.get("authorization", "")
        if token and not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
            return PlainTextResponse("The token is missing or wrong.", 401)
        try:
            program, files, limits = parsed_request(await body_of(request))
            outcome = await while_connected(request, sandbox.run(program, files, limits))
        except (BodyTooLarge, ProgramRefused) as error:
            return PlainTextResponse(str(error), 422)
        except (SandboxLost, CallerDisconnected) as error:
            return PlainTextResponse(str(error), 503)
        return JSONResponse(asdict(outcome))

    return Starlette(routes=[Route("/run", run, methods=["POST"])])


async def body_of(request: Request) -> bytes:
    """Raises `BodyTooLarge` as soon as too much has arrived."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > LARGEST_BODY_BYTES:
            raise BodyTooLarge(f"The body has more than {LARGEST_BODY_BYTES} bytes.")
    return bytes(body)


async def while_connected(request: Request, run: Awaitable[T]) -> T:
    """Awaits the run, and cancels it when the caller goes. Raises `CallerDisconnected` then, or what the run raises."""
    running = asyncio.ensure_future(run)
    gone = asyncio.ensure_future(request.receive())
    awaited: set[asyncio.Future[Any]] = {running, gone}
    try:
        await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            raise CallerDisconnected
        return running.result()
    finally:
        running.cancel()
        gone.cancel()


def main(
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 for any free one.")] = 8100,
    max_concurrent_runs: Annotated[int, typer.Option(help="Further runs wait.")] = 2 * (os.cpu_count() or 1),
    require_all: Annotated[bool, typer.Option(help="Start only if every wall stands.")] = False,
) -> None:
    """Runs untrusted programs for other machines."""
    token = os.environ.get(TOKEN_VARIABLE, "")
    if not token and host not in ("127.0.0.1", "::1", "localhost"):
        raise typer.BadParameter(
            f"--host {host} needs a token in {TOKEN_VARIABLE}: else anyone could run programs here."
        )
    sandbox = LocalSandbox(max_concurrent_runs, require="all" if require_all else ())
    try:
        uvicorn.run(build_app(sandbox, token), host=host, port=port, log_level="info")
    finally:
        sandbox.close()


if __name__ == "__main__":
    typer.run(main)
