"""Messages of vLLM's servers: fields that are null, and the role of a developer in the model's chat template.

SDKs dump messages with fields that are null, such as `name`, which vLLM refuses. And vLLM has no public way to what its
renderer does with roles before it renders.

Needed with vLLM 0.32; no upstream issue is known. `test_chat_messages.py` fails when vLLM takes null fields by itself.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from pydantic_core import core_schema
from vllm.renderers.hf import (
    _consolidate_system_messages,
    _convert_developer_to_system,
    _detect_developer_role_support,
)

from deployments.upstream.vllm.request_validation import replace_schema


def take_null_fields_of_messages(*models: type[BaseModel]) -> None:
    """Lets messages of these requests have fields that are null; holds as `fail_at_first_wrong_item` does."""
    for model in models:
        replace_schema(model, _validated_before(model.__pydantic_core_schema__))


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
