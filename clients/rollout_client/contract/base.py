"""The base classes of the contract's types."""

from pydantic import BaseModel, ConfigDict


class Strict(BaseModel):
    """Base of what a caller sends: an unknown field is an error."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


class Lenient(BaseModel):
    """Base of what the service sends: unknown fields are kept, so that an older client understands a newer service."""

    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True)
