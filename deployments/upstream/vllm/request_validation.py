"""Validation of the requests of vLLM's servers, which the first wrong item of a list ends.

pydantic goes on after a wrong item by default, and tries each of a union's types for each item: 3,000 wrong items in
the `input` of OpenAI's responses, 9 KB of JSON, gave 700,000 errors in 27 s, in which the replica did nothing else.

Needed with vLLM 0.32 and pydantic 2.14; no upstream issue is known. Holds for the adapters that FastAPI makes from now
on, as it does when a router is included.
"""

from typing import Any

from pydantic import BaseModel
from pydantic_core import SchemaValidator

LISTS = frozenset({"list", "set", "frozenset"})
"""The types of core schemas that know `fail_fast`; so do tuples, of which requests have none without an end."""


def fail_at_first_wrong_item(*models: type[BaseModel]) -> None:
    for model in models:
        replace_schema(model, _failing_fast(model.__pydantic_core_schema__, {}))


def replace_schema(model: type[BaseModel], schema: Any) -> None:
    # Of a complete class pydantic would take the validator that is there.
    model.__pydantic_complete__ = False
    model.__pydantic_core_schema__ = schema
    model.__pydantic_validator__ = SchemaValidator(schema)
    model.__pydantic_complete__ = True


def _failing_fast(schema: Any, copies: dict[int, Any]) -> Any:
    """A copy of a core schema.

    Args:
        copies: those of its parts so far, by their identity.
    """
    if id(schema) in copies:
        return copies[id(schema)]
    if isinstance(schema, dict):
        copy: Any = {name: _failing_fast(part, copies) for name, part in schema.items()}
        # A dictionary of fields may have one that is called `type`.
        if isinstance(kind := copy.get("type"), str) and kind in LISTS:
            copy["fail_fast"] = True
    elif isinstance(schema, list):
        copy = [_failing_fast(part, copies) for part in schema]
    elif type(schema) is tuple:
        copy = tuple(_failing_fast(part, copies) for part in schema)
    else:
        return schema
    copies[id(schema)] = copy
    return copy
