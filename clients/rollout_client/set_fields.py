"""The fields of a model that were set, as `exclude_unset` has them: explicit nulls survive."""

from typing import Any

from pydantic import BaseModel


def set_fields(model: BaseModel) -> dict[str, Any]:
    """The fields of `model` that were set, null or not, and its extra fields. Values are not converted."""
    was_set = model.model_fields_set
    said = {name: value for name, value in model.__dict__.items() if name in was_set}
    return {**said, **model.model_extra} if model.model_extra else said
