"""Reads the body of `POST /rollout` as a `RolloutRequest`, whatever its type and encoding."""

from dataclasses import dataclass

from fastapi import Request

from rollout_client.contract import RolloutRequest
from service.requests.body import read_body
from service.requests.body_parser import BodyParser
from service.requests.media_types import rollout_media_type


@dataclass(frozen=True, slots=True)
class ReceivedRequest:
    """A request and the size of its decompressed body."""

    request: RolloutRequest
    body_bytes: int


async def read_rollout_request(request: Request, most_bytes: int, parser: BodyParser) -> ReceivedRequest:
    """Reads a body of at most `most_bytes`, and parses it.

    Raises:
        RequestProblem: 400, 413, 415 or 422, whatever is wrong with the body; 503, the process that parses it died.
    """
    media_type = rollout_media_type(request.headers)
    body = await read_body(request, most_bytes)
    return ReceivedRequest(await parser.parse(body, media_type), len(body))
