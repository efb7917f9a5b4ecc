"""Reads the body of `POST /rollout` as a `RolloutRequest`, whatever its type and encoding."""

from dataclasses import dataclass

from fastapi import Request

from rollout_client.contract import RolloutRequest
from service.admission.admission import AdmittedRequest
from service.http.request_body import read_body
from service.requests.media_types import rollout_media_type
from service.rollout_requests.body_parser import BodyParser


@dataclass(frozen=True, slots=True)
class ReceivedRequest:
    """A request and the size of its decompressed body."""

    request: RolloutRequest
    body_bytes: int


async def read_rollout_request(
    request: Request, most_bytes: int, parser: BodyParser, admitted: AdmittedRequest
) -> ReceivedRequest:
    """Reads a body of at most `most_bytes`, and parses it.

    The body is held by `admitted` before it is read, and its rollouts before anything is done for them.

    Raises:
        RequestProblem: 400, 408, 413, 415 or 422, whatever is wrong with the body; 429 if it cannot be admitted now;
            503, the process that parses it died.
    """
    media_type = rollout_media_type(request.headers)
    body = await read_body(request, most_bytes, hold=admitted.hold_body)
    body_bytes = len(body)
    parsed = await parser.parse(body, media_type)
    admitted.hold_rollouts(parsed)
    return ReceivedRequest(parsed, body_bytes)
