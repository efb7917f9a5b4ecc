"""Shared parts of all settings: the strict base class, and keys that come from environment variables."""

import os
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    HttpUrl,
    ModelWrapValidatorHandler,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError


class StrictSettings(BaseModel):
    """Settings that refuse unknown names and list the permitted ones."""

    model_config = ConfigDict(use_attribute_docstrings=True, extra="forbid")

    @model_validator(mode="wrap")
    @classmethod
    def list_permitted_names(cls, given: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return handler(given)
        except ValidationError as error:
            raise ValidationError.from_exception_data(
                cls.__name__,
                [
                    {
                        "type": PydanticCustomError(problem["type"], cls.message_of(problem)),
                        "loc": problem["loc"],
                        "input": problem["input"],
                    }
                    for problem in error.errors()
                ],
            ) from error

    @classmethod
    def message_of(cls, problem: ErrorDetails) -> str:
        is_unknown_name = problem["type"] == "extra_forbidden" and len(problem["loc"]) == 1
        return f"unknown; permitted are {', '.join(cls.model_fields)}" if is_unknown_name else problem["msg"]


def _refuse_credentials(url: HttpUrl) -> HttpUrl:
    """Returns the URL. Raises `ValueError` if it holds a user name or a password, which would be logged."""
    if url.username or url.password:
        raise ValueError("a key in the address would be in logs: name the variable that has it in api_key_variable")
    return url


UrlWithoutKey = Annotated[HttpUrl, AfterValidator(_refuse_credentials)]


class KeyMissing(Exception):
    """The environment variable that should hold a key is not set. The message names it."""


def bearer_headers(variable: str | None) -> dict[str, str]:
    """The `Authorization` header with the key in an environment variable; empty without a variable.

    Raises:
        KeyMissing: the variable is not set.
    """
    if variable is None:
        return {}
    if not (key := os.environ.get(variable)):
        raise KeyMissing(f"the environment variable {variable} holds no key: set it where the service starts")
    return {"Authorization": f"Bearer {key}"}
