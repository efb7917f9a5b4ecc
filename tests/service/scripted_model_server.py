"""A model server that answers as it is told, and notes what it was asked."""

from collections.abc import AsyncGenerator, Sequence

from deployments.failures import RolloutFailure
from deployments.serving_records import ModelServer, ServedPart, ServedRequest, ServedTokens

JSON_PARTS = [
    ServedPart(b'{"id":', 200, "application/json"),
    ServedPart(b'"a"}', tokens=ServedTokens(prompt=7, generated=3)),
]


class ScriptedModelServer(ModelServer):
    def __init__(self, parts: Sequence[ServedPart | RolloutFailure] = JSON_PARTS) -> None:
        self.parts = parts
        self.requests: list[ServedRequest] = []
        self.released: list[str] = []
        self.was_left = False

    async def serve(self, request: ServedRequest) -> AsyncGenerator[ServedPart, None]:
        self.requests.append(request)
        try:
            for part in self.parts:
                if isinstance(part, RolloutFailure):
                    raise part
                yield part
        except GeneratorExit:
            self.was_left = True
            raise

    def release(self, rollout_id: str) -> None:
        self.released.append(rollout_id)
