"""A model server that answers as it is told, and notes what it was asked."""

import asyncio
from collections.abc import AsyncGenerator, Sequence

from deployments.protocols.model_server import CallsToAbort, ModelServer, ServedPart, ServedRequest, ServedTokens

JSON_PARTS = [
    ServedPart(b'{"id":', 200, "application/json"),
    ServedPart(b'"a"}', tokens=ServedTokens(prompt=7, generated=3)),
]
REFUSED = [ServedPart(b"{}", 400, "application/json", tokens=ServedTokens())]


class ScriptedModelServer(ModelServer):
    def __init__(self, parts: Sequence[ServedPart | Exception | float] = JSON_PARTS) -> None:
        """Args: `parts` of each answer; a number is a pause of so many seconds."""
        self.parts = parts
        self.requests: list[ServedRequest] = []
        self.released: list[str] = []
        self.was_left = False
        self.aborted: list[CallsToAbort] = []

    async def serve(self, request: ServedRequest) -> AsyncGenerator[ServedPart, None]:
        self.requests.append(request)
        try:
            for part in self.parts:
                if isinstance(part, Exception):
                    raise part
                if isinstance(part, ServedPart):
                    yield part
                else:
                    await asyncio.sleep(part)
        except (GeneratorExit, asyncio.CancelledError):
            self.was_left = True
            raise

    async def abort_calls(self, calls: CallsToAbort) -> None:
        self.aborted.append(calls)

    def release(self, rollout_id: str) -> None:
        self.released.append(rollout_id)
