"""The settings of an environment: the arguments of its constructor, validated by the constructor's annotations."""

import inspect
from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

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


class TypeName:
    """An annotation as a signature shows it."""

    def __init__(self, annotation: Any) -> None:
        self._text = type_name(annotation)

    def __repr__(self) -> str:
        return self._text


def signature_for_the_user(environment_class: type[TaskEnvironment]) -> str:
    """The parameters of the constructor in brackets. Types have their short names, without constraints."""
    annotations = annotations_of(environment_class)
    signature = inspect.signature(environment_class)
    parameters = [
        parameter
        if parameter.annotation is parameter.empty
        else parameter.replace(annotation=TypeName(annotations.get(parameter.name, parameter.annotation)))
        for parameter in signature.parameters.values()
    ]
    return str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))


def type_name(annotation: Any) -> str:
    """Such as `list[int] | None`, as its author would write it."""
    origin, inside = get_origin(annotation), get_args(annotation)
    if isinstance(annotation, str):
        return annotation
    if annotation in (None, NoneType):
        return "None"
    if annotation is Ellipsis:
        return "..."
    if origin is Annotated:
        return type_name(inside[0])
    if origin in (Union, UnionType):
        return " | ".join(map(type_name, inside))
    if origin is Literal:
        return f"Literal[{', '.join(map(repr, inside))}]"
    if isinstance(annotation, list):  # The parameters of a Callable.
        return f"[{', '.join(map(type_name, annotation))}]"
    if origin is not None:
        return f"{type_name(origin)}[{', '.join(map(type_name, inside))}]"
    return getattr(annotation, "__name__", repr(annotation))


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
