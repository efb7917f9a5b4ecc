"""Reads the JSON bodies of the `/policy` and `/jobs` routes, with the same refusals as `/rollout` has."""

from typing import TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from service.http.request_body import read_body
from service.problems import validation_problem
from service.requests.media_types import refuse_other_than_json

Model = TypeVar("Model", bound=BaseModel)


async def read_json_body(request: Request, model: type[Model], most_bytes: int, advice: str) -> Model:
    """The body as `model`. `advice` says what to do with one of more than `most_bytes`.

    Raises:
        RequestProblem: 400 for a body that is not JSON or not in its encoding, 413 for one that is too large, 415 for
            an unsupported type or encoding, 422 for fields that are wrong.
    """
    refuse_other_than_json(request.headers)
    content = await read_body(request, most_bytes, advice)
    try:
        return model.model_validate_json(content, strict=True)
    except ValidationError as error:
        raise validation_problem(error) from error
