"""Checks the `extra_env_info` of samples with the environment's own model, before anything is generated for them."""

import logging
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from deployments.protocols import RefusedField

MOST_REFUSED_FIELDS = 20
logger = logging.getLogger("rollout_service.environments")


def refused_fields(model: type[BaseModel], extra_env_infos: Sequence[dict[str, Any]]) -> list[RefusedField]:
    """The first `MOST_REFUSED_FIELDS` fields that the model does not accept."""
    refused: list[RefusedField] = []
    for place, extra_env_info in enumerate(extra_env_infos):
        for location, message in problems_of(model, extra_env_info).items():
            refused.append(RefusedField(place, location, message))
            if len(refused) == MOST_REFUSED_FIELDS:
                return refused
    return refused


def problems_of(model: type[BaseModel], extra_env_info: dict[str, Any]) -> dict[tuple[str | int, ...], str]:
    """What is wrong, by field. The alternatives of a union are one problem of their field."""
    try:
        model.model_validate(extra_env_info)
    except ValidationError as error:
        problems: dict[tuple[str | int, ...], str] = {}
        for details in error.errors(include_url=False, include_context=False):
            location = location_in(extra_env_info, details)
            message = details["msg"].removeprefix("Value error, ")
            problems[location] = f"{problems[location]}, or: {message}" if location in problems else message
        return problems
    except Exception as error:
        # A fault of the environment, not of the sample. The step meets it again, and its failure says so.
        logger.warning("The fields of a sample could not be checked.", exc_info=error)
    return {}


def location_in(extra_env_info: dict[str, Any], details: ErrorDetails) -> tuple[str | int, ...]:
    """The path of the field in `extra_env_info`, without the names that pydantic gives to the members of a union."""
    location: list[str | int] = []
    value: Any = extra_env_info
    for part in details["loc"]:
        is_there = part in value if isinstance(value, dict) else isinstance(value, list) and isinstance(part, int)
        if is_there:
            value = value[part]
        elif details["type"] != "missing" or part != details["loc"][-1]:
            continue
        location.append(part)
    return tuple(location)


def has_validators(model: type[BaseModel]) -> bool:
    """Whether the model runs functions that its JSON schema does not tell of."""
    return any(kind.startswith("function-") for kind in kinds_in(model.__pydantic_core_schema__))


def kinds_in(schema: Any) -> Iterator[str]:
    """The types of all parts of a pydantic core schema."""
    parts = [schema]
    while parts:
        part = parts.pop()
        if isinstance(part, dict):
            kind = part.get("type")
            if isinstance(kind, str):
                yield kind
            parts.extend(value for key, value in part.items() if key != "metadata")
        elif isinstance(part, list | tuple):
            parts.extend(part)
