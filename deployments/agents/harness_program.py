"""An agent behind an HTTP server: it is asked once for each rollout, and answers when the run has ended."""

import os
from http import HTTPStatus
from urllib.parse import urlsplit

import httpx
import orjson

from deployments.agents.programs import AgentCall, AgentProgram, LastSaid, last_of, reward_of
from deployments.agents.settings import HarnessSettings
from deployments.failures import AgentFailed, EnvironmentLost

LOOPBACK = ("localhost", "127.0.0.1", "::1")
CONNECT_WITHIN_S = 10.0
MOST_BYTES = 2**20
TEMPORARY = {
    HTTPStatus.REQUEST_TIMEOUT,
    HTTPStatus.TOO_EARLY,
    HTTPStatus.TOO_MANY_REQUESTS,
    HTTPStatus.BAD_GATEWAY,
    HTTPStatus.SERVICE_UNAVAILABLE,
    HTTPStatus.GATEWAY_TIMEOUT,
}


class HarnessKeyMissing(Exception):
    """The environment variable with the key of a harness is not set."""


class HarnessProgram(AgentProgram):
    def __init__(self, settings: HarnessSettings) -> None:
        """Raises `HarnessKeyMissing`."""
        self._url = str(settings.url)
        self._headers = headers_of(settings)
        self._client: httpx.AsyncClient | None = None

    async def run(self, call: AgentCall, said: LastSaid) -> dict[str, float]:  # noqa: ARG002
        try:
            status, body = await self._answer(call)
        except httpx.TransportError as error:
            raise EnvironmentLost(f"The harness at {self._url} does not answer: {error!r}.") from error
        answered = last_of(body.decode(errors="replace"))
        if status in TEMPORARY:
            raise EnvironmentLost(f"The harness at {self._url} cannot run the agent just now: {status}. {answered}")
        if not httpx.codes.is_success(status):
            raise AgentFailed(f"The harness at {self._url} answered {status}. {answered}")
        try:
            answer = orjson.loads(body) if body.strip() else None
        except orjson.JSONDecodeError as error:
            raise AgentFailed(f"The harness at {self._url} answered no JSON: {answered}") from error
        return reward_of(answer, f"The answer of the harness at {self._url}")

    async def _answer(self, call: AgentCall) -> tuple[int, bytes]:
        """The status and at most `MOST_BYTES` of the body. Raises `AgentFailed` for more."""
        if self._client is None:
            is_here = urlsplit(self._url).hostname in LOOPBACK
            self._client = httpx.AsyncClient(
                timeout=httpx.Timeout(None, connect=CONNECT_WITHIN_S),
                limits=httpx.Limits(max_connections=None),
                headers=self._headers,
                trust_env=not is_here,
            )
        sent = orjson.dumps(call.model_dump())
        headers = {"content-type": "application/json"}
        async with self._client.stream("POST", self._url, content=sent, headers=headers) as response:
            body = bytearray()
            async for part in response.aiter_bytes():
                body += part
                if len(body) > MOST_BYTES:
                    raise AgentFailed(f"The harness at {self._url} answered more than {MOST_BYTES} bytes.")
            return response.status_code, bytes(body)


def headers_of(settings: HarnessSettings) -> dict[str, str]:
    """Raises `HarnessKeyMissing`."""
    if settings.api_key_variable is None:
        return {}
    if not (key := os.environ.get(settings.api_key_variable)):
        raise HarnessKeyMissing(f"the environment variable {settings.api_key_variable} is not set")
    return {"authorization": f"Bearer {key}"}
