"""What of a model was set: all that an answer says, and all that is sent."""

from typing import Any

from pydantic import BaseModel


def set_fields(model: BaseModel) -> dict[str, Any]:
    """The fields of `model` that were set, null or not, and its further ones; their values as they are."""
    was_set = model.model_fields_set
    said = {name: value for name, value in model.__dict__.items() if name in was_set}
    return {**said, **model.model_extra} if model.model_extra else said
