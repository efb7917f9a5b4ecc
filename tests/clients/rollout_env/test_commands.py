"""`python -m rollout_env`: a new environment is written with a test that passes, and `certify` finds what is wrong."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rollout_env.__main__ import main
from rollout_env.scaffold import NotWritten, write_environment


def said_by(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    main(arguments)
    return capsys.readouterr().out


def refusal_of(*arguments: str) -> str:
    with pytest.raises(SystemExit) as refusal:
        main(arguments)
    return str(refusal.value)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, from which modules are imported during the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    return tmp_path


def write_raising_environment(name: str, folder: Path) -> Path:
    write_environment(name, folder)
    file = folder / f"{name}.py"
    file.write_text(file.read_text().replace("reply.strip() == str(", "int(reply) == int("))
    return file


@pytest.mark.slow
def test_a_new_environment_passes_its_own_test(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = said_by(capsys, "init", "number-game", "--folder", str(tmp_path / "new"))
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["number_game.py", "test_number_game.py"]
    assert "    number_game:\n      import_path: number_game:NumberGameEnvironment\n" in said
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_number_game.py"]
    done = subprocess.run(command, cwd=tmp_path / "new", capture_output=True, text=True, check=False)
    assert "3 passed" in done.stdout, done.stdout


def test_a_new_environment_overwrites_nothing(tmp_path: Path) -> None:
    (tmp_path / "test_game.py").write_text("mine")
    with pytest.raises(NotWritten, match=r"test_game\.py exists already: choose another name or folder\.$"):
        write_environment("game", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["test_game.py"]


@pytest.mark.parametrize("name", ["Game", "1game", "game.py", "../game", ""])
def test_what_is_no_name_of_a_module_is_refused(name: str, tmp_path: Path) -> None:
    assert refusal_of("init", name, "--folder", str(tmp_path)) == (
        f"{name!r} is not a name for a module: use small letters, digits and _, such as number_game."
    )


@pytest.mark.slow
def test_a_new_environment_is_certified_with_one_row_for_each_check(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_environment("kept_game", folder)
    arguments = ["certify", "kept_game:KeptGameEnvironment", "--samples", "2", "--arguments", '{"most_guesses": 2}']
    *rows, verdict = said_by(capsys, *arguments, "--out", "certificate.json").splitlines()
    document = json.loads((folder / "certificate.json").read_text())
    assert verdict == f"kept_game:KeptGameEnvironment passes. Certificate {document['hash'][:16]}"
    assert [row.split()[0] for row in rows if row.startswith("  ")] == [check["name"] for check in document["checks"]]
    assert "  oracle             passed       2 plays" in rows
    assert document["arguments"] == {"most_guesses": 2}


def test_the_hash_of_a_certificate_is_another_one_for_other_findings_source_or_arguments(folder: Path) -> None:
    write_environment("hashed_game", folder)
    hashes = set()
    for arguments in (
        ["--only", "sample"],
        ["--only", "start"],
        ["--only", "sample", "--arguments", '{"most_guesses": 9}'],
    ):
        for _ in range(2):
            main(["certify", "hashed_game:HashedGameEnvironment", *arguments, "--out", "certificate.json"])
            hashes.add(json.loads((folder / "certificate.json").read_text())["hash"])
    assert len(hashes) == 3


def test_what_is_wrong_is_below_its_row_and_exit_code_1(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_raising_environment("raising_game", folder)
    with pytest.raises(SystemExit, match="1"):
        main(["certify", "raising_game:RaisingGameEnvironment", "--only", "step"])
    said = capsys.readouterr().out.splitlines()
    assert said[:2] == ["rules", "  step               failed       3 plays"]
    assert said[2].startswith("      Sample 0, turn 1, reply '': step raised ValueError: invalid literal for int()")
    assert said[-1].startswith("raising_game:RaisingGameEnvironment fails 1 checks: step.")


@pytest.mark.usefixtures("folder")
def test_each_command_says_it_as_json_if_told_to(capsys: pytest.CaptureFixture[str]) -> None:
    written = json.loads(said_by(capsys, "init", "json-game", "--json"))
    assert written == {"import_path": "json_game:JsonGameEnvironment", "files": ["json_game.py", "test_json_game.py"]}
    document = json.loads(said_by(capsys, "certify", written["import_path"], "--only", "sample", "--json"))
    [check] = document["checks"]
    assert check == {"name": "sample", "group": "rules", "plays": 3, "findings": [], "note": "", "status": "passed"}


def test_an_environment_that_cannot_be_loaded_is_refused() -> None:
    refusal = refusal_of("certify", "nowhere:Game")
    assert refusal.startswith("nowhere:Game cannot be imported: there is no module nowhere.")
