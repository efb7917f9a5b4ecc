"""Values of a call whose format has no types: text is read by the JSON schema of its tool, and nothing is guessed."""

import ast
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

CHOICES = ("anyOf", "oneOf", "allOf")
LONGEST_LITERAL = 20_000
"""Limit in characters: Python's parser takes memory in proportion, and can fail on deep nesting."""
TYPES = {
    type(None): "null",
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}


def typed_arguments(texts: Mapping[str, str], name: str, tools: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The texts of parameters as values of the types that the tool of this name gives them; else as they are."""
    schema = _schema_of(name, tools)
    return {
        parameter: value_of(text, _types_of(_of_parameter(parameter, schema), schema))
        for parameter, text in texts.items()
    }


def _schema_of(name: str, tools: Iterable[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The schema of a tool's arguments; empty if there is no such tool."""
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and function.get("name") == name:
            parameters = function.get("parameters")
            return parameters if isinstance(parameters, Mapping) else {}
    return {}


def _of_parameter(parameter: str, schema: Mapping[str, Any]) -> Any:
    known = schema.get("properties")
    if isinstance(known, Mapping) and parameter in known:
        return known[parameter]
    return schema.get("additionalProperties")


def _types_of(schema: Any, root: Mapping[str, Any], followed: set[str] | None = None) -> set[str]:
    """The types that a schema may permit, by its own words; empty if it says nothing of them.

    Args:
        followed: references that are not followed again.
    """
    if not isinstance(schema, Mapping):
        return set()
    followed = set() if followed is None else followed
    given = schema.get("type")
    types = {given} if isinstance(given, str) else {each for each in _listed(given) if isinstance(each, str)}
    values = [*_listed(schema.get("enum")), *([schema["const"]] if "const" in schema else [])]
    types |= {TYPES[type(value)] for value in values if type(value) in TYPES}
    types |= {"null"} if schema.get("nullable") is True else set()
    further = [choice for name in CHOICES for choice in _listed(schema.get(name))]
    if isinstance(reference := schema.get("$ref"), str) and reference not in followed:
        followed.add(reference)
        further.append(_referred(reference, root))
    types = types.union(*(_types_of(each, root, followed) for each in further))
    if not types:
        return {"object"} if "properties" in schema else {"array"} if "items" in schema else set()
    return types


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _referred(reference: str, root: Mapping[str, Any]) -> Any:
    """The part of the schema that a local reference such as `#/$defs/Colour` names; `None` without one."""
    found: Any = root
    for part in reference.removeprefix("#").split("/")[1:]:
        found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found if reference.startswith("#") else None


def value_of(text: str, types: set[str]) -> Any:
    """The text as a value of one of the types, a string last; as it is where it is none of them.

    What has no string among its types may be spelled as in Python, as models that were shown Python's values do.
    """
    plain = text.strip()
    is_text = not types or "string" in types
    if "null" in types and plain.lower() in (("null",) if is_text else ("null", "none")):
        return None
    if "boolean" in types and plain.lower() in ("true", "false"):
        return plain.lower() == "true"
    value = None if types <= {"null", "boolean", "string"} else _parsed(plain, may_be_python=not is_text)
    if isinstance(value, float) and not math.isfinite(value):
        return text
    if isinstance(value, float) and value.is_integer() and "integer" in types:
        return int(value)
    named = {TYPES[type(value)], "number" if type(value) is int else ""} - {"null", "boolean", "string"}
    return value if named & types else text


def _parsed(text: str, may_be_python: bool) -> Any:
    """JSON, or else a list or dictionary of Python's; `None` if the text is neither."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        if not may_be_python or len(text) > LONGEST_LITERAL or not text.startswith(("[", "{")):
            return None
    try:
        value = ast.literal_eval(text)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
    return value if type(value) in TYPES else None
