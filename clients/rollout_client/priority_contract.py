"""The `priority` of a rollout request."""

from typing import Annotated, Literal

from pydantic import Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator


def class_or_number(priority: object, validate: ValidatorFunctionWrapHandler) -> object:
    try:
        return validate(priority)
    except ValidationError as error:
        raise ValueError("Input should be 'interactive', 'train', 'batch' or a number from 0.001 to 1000") from error


Priority = Annotated[
    Literal["interactive", "train", "batch"] | Annotated[float, Field(ge=0.001, le=1000)],
    WrapValidator(class_or_number),
]
"""The share of the engines that a request gets: the name of a class, or a number in proportion to `train`."""
