"""The settings of an environment: the arguments of its constructor, validated by the constructor's annotations."""

import inspect
from collections.abc import Mapping
from typing import Any

from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError

from rollout_env import TaskEnvironment

ANY_CLASS = ConfigDict(arbitrary_types_allowed=True)


class ArgumentsInvalid(Exception):
    """Each wrong argument, what is wrong with it, and its value; without a final full stop."""


def validated_arguments(environment_class: type[TaskEnvironment], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments as their annotations make them. All are names of parameters.

    Raises:
        ArgumentsInvalid: values that their annotations do not accept.
    """
    annotations = annotations_of(environment_class)
    validated: dict[str, Any] = {}
    problems: list[str] = []
    for name, value in arguments.items():
        try:
            validated[name] = validator_of(annotations.get(name, Any)).validate_python(value)
        except ValidationError as error:
            problems += problems_of(name, error)
    if problems:
        raise ArgumentsInvalid("; ".join(problems))
    return validated


def annotations_of(environment_class: type[TaskEnvironment]) -> dict[str, Any]:
    """By parameter. One that names what exists for type checkers only permits every value."""
    try:
        signature = inspect.signature(environment_class, eval_str=True)
    except Exception:  # noqa: BLE001 - evaluating a text raises anything
        signature = inspect.signature(environment_class)
    return {
        parameter.name: parameter.annotation
        for parameter in signature.parameters.values()
        if parameter.annotation is not parameter.empty and not isinstance(parameter.annotation, str)
    }


def validator_of(annotation: Any) -> TypeAdapter[Any]:
    try:
        return TypeAdapter(annotation, config=ANY_CLASS)
    except PydanticUserError as error:
        # A pydantic model has a config of its own. What pydantic cannot validate the constructor has to.
        return TypeAdapter(annotation if error.code == "type-adapter-config-unused" else Any)


def problems_of(name: str, error: ValidationError) -> list[str]:
    return [
        f"{'.'.join([name, *map(str, problem['loc'])])}: {problem['msg'].removeprefix('Value error, ')} "
        f"(given: {problem['input']!r})"
        for problem in error.errors()
    ]
