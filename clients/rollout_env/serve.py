"""Serves an environment over HTTP, from a Python environment of its own: `python -m rollout_env serve MODULE:CLASS`.

It needs the extra `serve` (starlette and uvicorn) and the environment's packages, but nothing of the service. The
caller is `HostedEnvironment` (`deployments/tasks/bridges/hosted.py`).

- `GET /description`: the properties of the environment that the caller needs.
- `POST /examples`, `/start`, `/step`: its methods. `POST /sessions` gives the id under which a rollout is stepped.
- `DELETE /sessions/{id}`: closes it.

Exceptions of the environment are answers with status 409 and a `kind`.
"""

import asyncio
import sys
import threading
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict
from typing import Any
from uuid import uuid4

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rollout_env.environment import TaskEnvironment, forks_sessions, has_a_start, has_sessions
from rollout_env.records import (
    OutcomeInvalid,
    SampleRejected,
    TemporaryFailure,
    escaped_half_surrogates,
    with_written_images,
)
from rollout_env.steps import RolloutSteps, call, validated_start

GRACE_S = 3
"""Seconds that steps may take to finish when the server ends."""
Handler = Callable[[Any], Awaitable[Any]]


class _UnknownSession(Exception):
    """The session is closed, or belonged to another process."""


KINDS: dict[str, type[Exception]] = {
    "rejected": SampleRejected,
    "temporary": TemporaryFailure,
    "invalid": OutcomeInvalid,
    "lost": _UnknownSession,
}


class EnvironmentServer:
    """One environment with its sessions."""

    def __init__(self, environment: TaskEnvironment) -> None:
        self._environment = environment
        self._sessions: dict[str, RolloutSteps] = {}

    def app(self) -> Starlette:
        handlers: dict[str, Handler] = {
            "/examples": self._examples,
            "/start": self._start,
            "/sessions": self._open,
            "/step": self._step,
        }
        routes = [Route(path, answering(handler), methods=["POST"]) for path, handler in handlers.items()]
        return Starlette(
            routes=[
                Route("/description", self._description),
                Route("/sessions/{session_id}", self._close, methods=["DELETE"]),
                *routes,
            ],
            lifespan=self._lifespan,
        )

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        """Closes the sessions and then the environment at the end, even if some raise; raises the last error."""
        async with AsyncExitStack() as closing:
            closing.push_async_callback(call, self._environment.close)
            yield
            for steps in self._sessions.values():
                closing.push_async_callback(steps.close)

    async def _description(self, _: Request) -> Response:
        environment = self._environment
        names = ("description", "max_sessions", "session_idle_s", "max_concurrent_steps", "sample_count")
        return JSONResponse(
            {
                **{name: getattr(environment, name) for name in names},
                "fields": environment.ExtraEnvInfo.model_json_schema(),
                "tools": list(environment.tools),
                "has_start": has_a_start(type(environment)),
                "lost_session": environment.lost_session if has_sessions(type(environment)) else "reopen",
                "forks_sessions": forks_sessions(environment) or not has_sessions(type(environment)),
            }
        )

    async def _examples(self, body: Any) -> Any:
        return await call(self._environment.example_samples, body["count"], body["seed"])

    async def _start(self, body: Any) -> Any:
        if not has_a_start(type(self._environment)):
            return None
        outcome = await validated_start(self._environment, body["message_log"], body["extra_env_info"])
        return with_written_images(asdict(outcome))

    async def _open(self, body: Any) -> Any:
        session_id = uuid4().hex
        self._sessions[session_id] = RolloutSteps([self._environment], forks=body.get("forks", False))
        return {"session_id": session_id}

    async def _step(self, body: Any) -> Any:
        steps = self._sessions.get(body["session_id"])
        if steps is None:
            raise _UnknownSession("The session is not known any more.")
        return with_written_images(asdict(await steps.step(body["message_log"], body["extra_env_info"])))

    async def _close(self, request: Request) -> Response:
        steps = self._sessions.pop(request.path_params["session_id"], None)
        if steps is not None:
            await steps.close()
        return Response(status_code=204)


def answering(handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    """Makes a route of a handler that takes the JSON of the body."""

    async def answer(request: Request) -> Response:
        body = await request.json()
        try:
            return JSONResponse(await _while_connected(request, handler(body)))
        except _Disconnected:
            return Response(status_code=499)
        except Exception as error:  # noqa: BLE001 - whatever an environment raises is an answer
            kind = next((name for name, types in KINDS.items() if isinstance(error, types)), None)
            problem = {"kind": kind or "raised", "message": str(error)}
            if kind is None:
                problem |= {"message": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
        written = {name: escaped_half_surrogates(text) for name, text in problem.items()}
        return JSONResponse(written, status_code=409)

    return answer


class _Disconnected(Exception):
    """The caller has disconnected."""


async def _while_connected(request: Request, work: Awaitable[Any]) -> Any:
    """Awaits the work. Cancels it and raises `_Disconnected` when the caller disconnects."""
    running = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait({running, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            raise _Disconnected
        return running.result()
    finally:
        running.cancel()
        gone.cancel()


def serve(environment: TaskEnvironment, socket: str | None, host: str, port: int, until_input_ends: bool) -> None:
    """Serves until the process is ended.

    Args:
        socket: a path for a Unix socket, in place of host and port.
        until_input_ends: also ends when standard input does, which is when the process that started this one is gone.
    """
    app = EnvironmentServer(environment).app()
    config = uvicorn.Config(
        app, uds=socket, host=host, port=port, log_level="warning", timeout_graceful_shutdown=GRACE_S
    )
    server = uvicorn.Server(config)
    if until_input_ends:
        threading.Thread(target=_end_with_input, args=(server,), daemon=True).start()
    server.run()


def _end_with_input(server: uvicorn.Server) -> None:
    while sys.stdin.buffer.read(4096):
        continue
    server.should_exit = True
