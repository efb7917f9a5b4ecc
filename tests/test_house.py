"""The figures of the house and its rules, on trees that are made up."""

import pytest

from tests.house import Figure, broken_rules, code_lines, figures, public_names


def tree(**modules: int) -> dict[str, str]:
    """A module of the service for each name, with so many lines."""
    return {f"service/{name}.py": "pass\n" * count for name, count in modules.items()}


def figure(sources: dict[str, str], name: str) -> Figure:
    [found] = [each for each in figures(sources) if each.name == name]
    return found


def test_modules_of_the_server_are_counted_without_inits_and_code_without_what_is_generated() -> None:
    others = {
        "deployments/tasks/__init__.py": "pass\n",
        "clients/rollout_client/a.py": "pass\n" * 7,
        "clients/rollout_client/calls/sync_client/policy.py": "pass\n" * 500,
        "tests/test_a.py": "pass\n" * 10,
    }
    sources = tree(short=59, middle=60, long=400, longer=401) | others

    assert {each.name: each.value for each in figures(sources)} == {
        "code lines of the server": 921,
        "of them in tasks": 1,
        "code lines of the clients": 7,
        "code lines of the tests": 10,
        "public names of the server": 0,
        "modules of the server": 4,
        "median lines of a module": 230,
        "modules below 60 lines": 1,
        "modules above 400 lines": 1,
    }


def test_a_code_line_is_no_comment_docstring_import_or_blank() -> None:
    source = '''"""A module."""

import os
from a import (
    b,
)

A = [
    # A comment.
    1,
]
"""About A."""


def f() -> str:
    """Says nothing."""
    return """Two
lines."""
'''
    assert code_lines(source) == 3 + 1 + 2


def test_public_names_are_classes_and_functions_of_the_module() -> None:
    source = "class A:\n    def b(self): ...\ndef _c(): ...\nasync def d(): ...\nE = 1\n"
    assert public_names(source) == 2


def test_a_figure_is_kept_up_to_its_bound() -> None:
    assert figure(tree(a=110), "median lines of a module").is_kept
    assert not figure(tree(a=109), "median lines of a module").is_kept
    assert not figure(tree(a=221), "median lines of a module").is_kept
    tasks = {"deployments/tasks/a.py": "pass\n" * 4500}
    assert figure(tasks, "of them in tasks").is_kept
    beyond = figure({"deployments/tasks/a.py": "pass\n" * 4501}, "of them in tasks")
    assert not beyond.is_kept
    assert str(beyond) == "of them in tasks                4501   at most 4500   BEYOND"


def test_two_classes_of_one_name_are_found_and_the_generated_twin_is_none() -> None:
    sources = {
        "service/a.py": "class Twice: ...\n",
        "deployments/b.py": "\n\nclass Twice: ...\n",
        "clients/rollout_client/calls/sync_client/client.py": "class Twice: ...\n",
        "tests/test_a.py": "class Twice: ...\n",
    }
    [problem] = broken_rules(sources)
    assert problem == "service/a.py:1: class Twice is also in deployments/b.py:3: give one of them another name"


@pytest.mark.parametrize(
    ("path", "source"),
    [("service/a.py", "from json import loads as loads\n"), ("service/room/__init__.py", "from json import loads\n")],
)
def test_a_re_export_is_found(path: str, source: str) -> None:
    assert broken_rules({path: source}) == [f"{path}:1: loads is re-exported: import it from json"]


def test_what_users_import_from_may_re_export() -> None:
    assert broken_rules({"clients/rollout_env/__init__.py": "from json import loads\n"}) == []


@pytest.mark.parametrize("opener", ["What", "Of", "Args:"])
@pytest.mark.parametrize("code", ['"""{} x."""\n', 'def f() -> None:\n    """\n    {} x."""\n', 'A = 1\n"""{} x."""\n'])
def test_a_docstring_with_a_weak_opener_is_found(opener: str, code: str) -> None:
    [problem] = broken_rules({"service/a.py": code.format(opener)})
    assert problem.endswith(f": a docstring begins with {opener!r}: begin with a noun or a verb")
    assert broken_rules({"service/a.py": code.format("Offers")}) == []
