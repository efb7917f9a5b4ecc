"""Loads an environment from the import path and arguments in the config. Error messages are sentences.

`load_environment_class` and `checked_arguments` start nothing, so that a config is checked before the service starts.
Arguments are validated by the annotations of the constructor.
"""

import importlib
import inspect
import traceback
from collections.abc import Mapping
from functools import partial
from types import ModuleType
from typing import Any

from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from rollout_env.check import attribute_problems
from rollout_env.environment import TaskEnvironment, has_a_step


class EnvironmentNotLoadable(Exception):
    """An environment of the config cannot be made. The message begins with the import path."""


def load_environment(import_path: str, arguments: Mapping[str, Any]) -> TaskEnvironment:
    """Makes the environment at `package.module:Class`.

    Raises:
        EnvironmentNotLoadable: the import failed, the class is not a complete environment or does not take the
            arguments, its constructor raised, or its attributes are not set.
    """
    environment_class = load_environment_class(import_path)
    settings = checked_arguments(environment_class, arguments, import_path)
    try:
        environment = environment_class(**settings)
    except Exception as error:
        raise EnvironmentNotLoadable(
            f"{import_path} raised {_described(error)} when it was made with the arguments {dict(arguments)!r}"
            f"{_place_of(error)}."
        ) from error
    if problems := "; ".join(attribute_problems(environment)):
        raise EnvironmentNotLoadable(f"{import_path}: {problems}.")
    return environment


def certified_environment(import_path: str, arguments: Mapping[str, Any]) -> partial[TaskEnvironment]:
    """Makes the environment that is played for the certificate of this one. Raises `EnvironmentNotLoadable`."""
    played = load_environment_class(import_path).certified_as or import_path
    load_environment_class(played)
    return partial(load_environment, played, arguments)


def load_environment_class(import_path: str) -> type[TaskEnvironment]:
    """Imports the class at `package.module:Class` and checks that it is an environment.

    Raises:
        EnvironmentNotLoadable: the import failed, or the class is not a complete environment.
    """
    module_name, _, class_name = import_path.rpartition(":" if ":" in import_path else ".")
    if not (module_name and class_name):
        raise EnvironmentNotLoadable(f"{import_path!r} is not an import path: write package.module:Class.")
    module = _import_module(module_name, import_path)
    try:
        environment_class: type[TaskEnvironment] = getattr(module, class_name)
    except AttributeError as error:
        raise EnvironmentNotLoadable(f"{import_path}: module {module_name} has no {class_name}.") from error
    if problem := _problem_of_class(environment_class):
        raise EnvironmentNotLoadable(f"{import_path} {problem}")
    return environment_class


def checked_arguments(
    environment_class: type[TaskEnvironment], arguments: Mapping[str, Any], import_path: str
) -> dict[str, Any]:
    """Arguments converted by the constructor's annotations, such as a mapping to a pydantic model.

    Checks names and values, and that none is missing, without making the environment.

    Raises:
        EnvironmentNotLoadable: the constructor does not take these arguments.
    """
    try:
        signature = inspect.signature(environment_class, eval_str=True)
    except Exception:  # noqa: BLE001 - an annotation may name something that exists only for type checkers
        signature = inspect.signature(environment_class)
    types = {
        parameter.name: parameter.annotation
        for parameter in signature.parameters.values()
        if parameter.annotation is not parameter.empty and not isinstance(parameter.annotation, str)
    }
    try:
        signature.bind(**arguments)
        return _validated(arguments, types)
    except TypeError as error:
        problem = str(error)
    except ValidationError as error:
        problem = "; ".join(map(_argument_problem, error.errors()))
    shown = signature.replace(return_annotation=signature.empty)
    raise EnvironmentNotLoadable(
        f"{import_path} does not take the arguments {dict(arguments)!r}: {problem}. Its constructor is "
        f"{environment_class.__name__}{shown}."
    )


def _argument_problem(found: Any) -> str:
    sentence = found["msg"].removeprefix("Value error, ")
    return f"{'.'.join(map(str, found['loc']))}: {sentence} (given: {found['input']!r})"


def _validated(arguments: Mapping[str, Any], types: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments converted to these types. Those that pydantic cannot validate are left to the constructor."""
    fields = TypedDict("fields", {name: types.get(name, Any) for name in arguments})  # type: ignore[misc]
    fields.__pydantic_config__ = ConfigDict(arbitrary_types_allowed=True)  # type: ignore[attr-defined]
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(fields)
    except PydanticUserError:
        return dict(arguments)
    return dict(adapter.validate_python(dict(arguments)))


def _import_module(module_name: str, import_path: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if missing == module_name or module_name.startswith(f"{missing}."):
            reason = f"there is no module {missing}"
        else:
            reason = f"module {module_name} imports {missing}, which is missing"
        raise EnvironmentNotLoadable(
            f"{import_path} cannot be imported: {reason}. Install its package in the Python environment of the "
            "service, or name its folder in PYTHONPATH."
        ) from error
    except (Exception, SystemExit) as error:
        raise EnvironmentNotLoadable(
            f"{import_path} cannot be imported: {_described(error)}{_place_of(error)}."
        ) from error


def _problem_of_class(candidate: Any) -> str | None:
    """Reason why `candidate` is not an environment that can be made, as the rest of a sentence."""
    if not (isinstance(candidate, type) and issubclass(candidate, TaskEnvironment)):
        return "is not a TaskEnvironment: derive the class from rollout_env.TaskEnvironment."
    if missing := [
        *sorted(candidate.__abstractmethods__),
        *([] if has_a_step(candidate) else ["step (or step_batch, or open_session)"]),
    ]:
        return f"does not implement {' and '.join(missing)}, which every TaskEnvironment must."
    return None


def _described(error: BaseException) -> str:
    """Type and message of an exception, without a final full stop."""
    return f"{type(error).__name__}: {error}".rstrip(".")


def _place_of(error: BaseException) -> str:
    """The line that raised, in brackets after a space."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    if isinstance(error, SyntaxError):
        return ""  # Its message names the line of the fault.
    return f" ({last.filename}, line {last.lineno})"
