"""A sandbox on another machine, over HTTP. `server.py` is the server's half.

`POST /run` takes a program, its files and its limits, and answers how it ended: 200 with an outcome, 422 if the program
is refused, 503 if the sandbox failed, 401 without the token.
"""

import base64
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import httpx

from deployments.sandbox.interface import Limits, Outcome, Program, ProgramRefused, Sandbox, SandboxLost

TOKEN_VARIABLE = "ROLLOUT_SANDBOX_TOKEN"
QUEUE_S = 120.0
"""How long a run may wait at the server before it begins, in seconds, beside its own time."""


class RemoteSandbox(Sandbox):
    """Runs programs at a server. A run whose connection breaks is lost, and the server ends it."""

    def __init__(self, url: str, token: str = "") -> None:
        """Opens no connection yet; `token` is the one that the server was started with."""
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self._client = httpx.AsyncClient(base_url=url, headers=headers, limits=limits)

    async def run(self, program: Program, files: Mapping[str, bytes], limits: Limits) -> Outcome:
        """See `Sandbox.run`."""
        timeout = httpx.Timeout(10.0, read=limits.time_s + QUEUE_S)
        try:
            answer = await self._client.post("/run", json=request_of(program, files, limits), timeout=timeout)
        except httpx.HTTPError as error:
            raise SandboxLost(f"The sandbox's server did not answer: {type(error).__name__} {error}".strip()) from error
        if answer.status_code == httpx.codes.UNPROCESSABLE_ENTITY:
            raise ProgramRefused(answer.text)
        if answer.status_code != httpx.codes.OK:
            raise SandboxLost(f"The sandbox's server answered {answer.status_code}: {answer.text[:500]}")
        try:
            return Outcome(**answer.json())
        except (TypeError, ValueError) as error:
            raise SandboxLost(f"The sandbox's server sent no outcome: {error}") from error

    def close(self) -> None:
        """Leaves the connections to their end, which needs no event loop."""


def request_of(program: Program, files: Mapping[str, bytes], limits: Limits) -> dict[str, Any]:
    """The body of `POST /run`."""
    encoded = {name: base64.b64encode(content).decode() for name, content in files.items()}
    return {"program": asdict(program), "files": encoded, "limits": asdict(limits)}


def parsed_request(body: bytes) -> tuple[Program, dict[str, bytes], Limits]:
    """Parses the body that `request_of` made. Raises `ProgramRefused`."""
    try:
        request = json.loads(body)
        program = dict(request["program"])
        program["arguments"] = tuple(program.get("arguments", ()))
        if not all(
            isinstance(text, str) for text in (program["source"], program.get("stdin", ""), *program["arguments"])
        ):
            raise TypeError("program has fields that are not text")
        files = {name: base64.b64decode(content, validate=True) for name, content in request.get("files", {}).items()}
        return Program(**program), files, Limits(**request.get("limits", {}))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ProgramRefused(f"The body is not a program: {error}") from error
