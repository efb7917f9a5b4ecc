"""Reads the body of `POST /rollout` as a `RolloutRequest`, whatever its type and encoding."""

import asyncio
from dataclasses import dataclass
from functools import partial

from fastapi import Request
from pydantic import ValidationError

from rollout_client.arrow.schema import ARROW
from rollout_client.contract import RolloutRequest
from service.requests.arrow_body import arrow_request
from service.requests.body import read_body
from service.requests.media_types import rollout_media_type
from service.responses.problems import validation_problem

MOST_BYTES_INLINE = 2**16
"""Parsing this much takes most of a millisecond, several times the cost of handing it to a thread."""


@dataclass(frozen=True, slots=True)
class ReceivedRequest:
    """A request and the size of its decompressed body."""

    request: RolloutRequest
    body_bytes: int


async def read_rollout_request(request: Request, most_bytes: int) -> ReceivedRequest:
    """Reads a body of at most `most_bytes`; parses a large one in a thread, so that other requests go on.

    Raises:
        RequestProblem: 400, 413, 415 or 422, whatever is wrong with the body.
    """
    media_type = rollout_media_type(request.headers)
    body = await read_body(request, most_bytes)
    parse = arrow_request if media_type == ARROW else partial(RolloutRequest.model_validate_json, strict=True)
    try:
        parsed = parse(body) if len(body) <= MOST_BYTES_INLINE else await asyncio.to_thread(parse, body)
    except ValidationError as error:
        raise validation_problem(error) from error
    return ReceivedRequest(parsed, len(body))
