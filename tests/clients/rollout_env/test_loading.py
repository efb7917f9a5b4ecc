"""From an import path and arguments to an environment, and the sentences for what is wrong with them."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollout_env.loading import EnvironmentNotLoadable, checked_arguments, load_environment, load_environment_class
from tests.clients.rollout_env.faulty_environments import Judge, Judged, Loadable

MODULE = "tests.clients.rollout_env.faulty_environments"
INSTALL = "Install its package in the Python environment of the service, or name its folder in PYTHONPATH."


def refusal_of(load: Callable[..., object], *arguments: Any) -> str:
    with pytest.raises(EnvironmentNotLoadable) as refusal:
        load(*arguments)
    return str(refusal.value)


@pytest.mark.parametrize("import_path", [f"{MODULE}:Loadable", f"{MODULE}.Loadable"])
def test_an_environment_is_loaded_from_its_import_path(import_path: str) -> None:
    assert load_environment_class(import_path) is Loadable


def test_an_environment_is_made_with_its_arguments() -> None:
    environment = load_environment(f"{MODULE}:Loadable", {"greeting": "Hello.", "repeats": 2})
    assert isinstance(environment, Loadable)
    assert environment.greeting == "Hello.Hello."


NO_PATH = "is not an import path: write package.module:Class."
MISSING = "cannot be imported: there is no module"


@pytest.mark.parametrize(
    ("import_path", "message"),
    [
        *((path, f"{path!r} {NO_PATH}") for path in ("", "Environment", ":Environment", "package.module:")),
        *(
            (f"{module}:Echo", f"{module}:Echo {MISSING} {missing}. {INSTALL}")
            for module, missing in (("nowhere.echo", "nowhere"), (f"{MODULE}.echo", f"{MODULE}.echo"))
        ),
        (f"{MODULE}:Loadabel", f"{MODULE}:Loadabel: module {MODULE} has no Loadabel."),
        (
            f"{MODULE}:Word",
            f"{MODULE}:Word is not a TaskEnvironment: derive the class from rollout_env.TaskEnvironment.",
        ),
        (
            f"{MODULE}:WithoutMethods",
            f"{MODULE}:WithoutMethods does not implement example_samples and step (or step_batch, or open_session), "
            "which every TaskEnvironment must.",
        ),
        (f"{MODULE}:WithoutDescription", f"{MODULE}:WithoutDescription: description: Input should be a valid string."),
        (
            f"{MODULE}:WithoutExtraEnvInfo",
            f"{MODULE}:WithoutExtraEnvInfo: ExtraEnvInfo: Input should be a subclass of BaseModel.",
        ),
    ],
)
def test_what_cannot_be_imported_as_an_environment_is_refused(import_path: str, message: str) -> None:
    assert refusal_of(load_environment, import_path, {"greeting": "Hello."}) == message


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("needs", "import nowhere.at_all", f"module needs imports nowhere, which is missing. {INSTALL}"),
        ("raises", "raise OSError('No board.')", "OSError: No board ({folder}/raises.py, line 1)."),
    ],
)
def test_a_module_that_cannot_be_imported_is_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str, reason: str
) -> None:
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    refusal = refusal_of(load_environment_class, f"{name}:Echo")
    assert refusal == f"{name}:Echo cannot be imported: {reason.format(folder=tmp_path)}"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({}, "missing a required argument: 'greeting'"),
        ({"greeting": "Hello.", "repeat": 2}, "got an unexpected keyword argument 'repeat'"),
        (
            {"greeting": 3, "repeats": "many"},
            "greeting: Input should be a valid string (given: 3); repeats: Input should be a valid integer, unable to "
            "parse string as an integer (given: 'many')",
        ),
    ],
)
def test_arguments_that_the_constructor_does_not_take_are_refused(arguments: dict[str, Any], problem: str) -> None:
    assert refusal_of(checked_arguments, Loadable, arguments, "my_package:Loadable") == (
        f"my_package:Loadable does not take the arguments {arguments!r}: {problem}. "
        "Its constructor is Loadable(greeting: str, repeats: int = 1)."
    )


def test_a_constructor_that_raises_is_refused_with_what_it_raised() -> None:
    with pytest.raises(EnvironmentNotLoadable) as refusal:
        load_environment(f"{MODULE}:Loadable", {"greeting": "", "repeats": 0})
    file = sys.modules[MODULE].__file__
    lines = Path(str(file)).read_text().splitlines()
    line = next(number for number, text in enumerate(lines, start=1) if "raise ValueError" in text)
    assert str(refusal.value) == (
        f"{MODULE}:Loadable raised ValueError: repeats must be at least 1, got 0 "
        f"when it was made with the arguments {{'greeting': '', 'repeats': 0}} ({file}, line {line})."
    )
    assert isinstance(refusal.value.__cause__, ValueError)


def test_arguments_are_converted_by_the_constructors_annotations() -> None:
    arguments = {"judge": {"url": "http://judge", "retries": "2"}, "weights": {"a": 1}, "further": 3}
    made = checked_arguments(Judged, arguments, "my_package:Judged")
    assert made == {"judge": Judge(url="http://judge", retries=2), "weights": {"a": 1.0}, "further": 3}


def test_a_nested_argument_is_refused_with_its_path() -> None:
    arguments = {"judge": {"retries": -1}, "weights": {"a": 2}}
    refusal = refusal_of(checked_arguments, Judged, arguments, "my_package:Judged")
    assert refusal.partition("}}: ")[2].partition(". Its constructor")[0] == (
        "judge.url: Field required (given: {'retries': -1}); judge.retries: Input should be greater than or equal to 0 "
        "(given: -1); weights.a: Input should be less than or equal to 1 (given: 2)"
    )
