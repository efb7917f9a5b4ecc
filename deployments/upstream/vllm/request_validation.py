"""Validation of the requests of vLLM's servers: a list's first wrong item ends it, and messages may have null fields.

pydantic goes on after a wrong item by default, and tries each of a union's types for each item: 3,000 wrong items in
the `input` of OpenAI's responses, 9 KB of JSON, gave 700,000 errors in 27 s, in which the replica did nothing else.

SDKs dump messages with fields that are null, such as `name`, which vLLM refuses. And vLLM has no public way to what its
renderer does with roles before it renders, such as that of a developer.

Needed with vLLM 0.32 and pydantic 2.14; no upstream issue is known. `test_request_validation.py` fails when vLLM takes
null fields by itself. Holds for the adapters that FastAPI makes from now on, as it does when a router is included.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from pydantic_core import SchemaValidator, core_schema
from vllm.renderers.hf import _consolidate_system_messages, _convert_developer_to_system, _detect_developer_role_support

LISTS = frozenset({"list", "set", "frozenset"})
"""The types of core schemas that know `fail_fast`; so do tuples, of which requests have none without an end."""


def fail_at_first_wrong_item(*models: type[BaseModel]) -> None:
    for model in models:
        _replace_schema(model, _failing_fast(model.__pydantic_core_schema__, {}))


def _replace_schema(model: type[BaseModel], schema: Any) -> None:
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


def take_null_fields_of_messages(*models: type[BaseModel]) -> None:
    """Lets messages of these requests have fields that are null; holds as `fail_at_first_wrong_item` does."""
    for model in models:
        _replace_schema(model, _validated_before(model.__pydantic_core_schema__))


def _validated_before(schema: Any) -> Any:
    """A copy of a model's core schema that looks at `without_nulls` of its fields, before any validator of its own."""
    inner = schema["schema"]
    if schema["type"] != "model":
        return {**schema, "schema": _validated_before(inner)}
    if inner.get("function", {}).get("function") is without_nulls:
        return schema
    return {**schema, "schema": core_schema.no_info_before_validator_function(without_nulls, inner)}


def without_nulls(request: Any) -> Any:
    """The fields of a request without the null ones of its messages. Their contents, which may be null, stay."""
    if not isinstance(request, Mapping) or not isinstance(messages := request.get("messages"), list):
        return request
    return {**request, "messages": [_message_without_nulls(message) for message in messages]}


def _message_without_nulls(message: Any) -> Any:
    if not isinstance(message, Mapping) or None not in message.values():
        return message
    return {name: value for name, value in message.items() if value is not None or name == "content"}


def with_known_roles(conversation: list[Any], template: str | None) -> list[Any]:
    """The messages as vLLM's renderer makes them: a developer is a system to templates that do not know developers."""
    if template is None or _detect_developer_role_support(template):
        return conversation
    return _consolidate_system_messages(_convert_developer_to_system(conversation))
