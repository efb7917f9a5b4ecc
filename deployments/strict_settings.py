"""What all settings have in common."""

from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ModelWrapValidatorHandler, ValidationError, model_validator
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
