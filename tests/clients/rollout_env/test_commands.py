"""`python -m rollout_env`: a new environment is written with a test that passes, and `check` finds what is wrong."""

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


def test_an_environment_that_keeps_the_rules_is_said_to(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_environment("kept_game", folder)
    arguments = ["check", "kept_game:KeptGameEnvironment", "--samples", "2", "--arguments", '{"most_guesses": 2}']
    assert said_by(capsys, *arguments) == "kept_game:KeptGameEnvironment keeps the rules: 2 samples were played.\n"


def test_what_is_wrong_is_said_with_the_line_that_raised(folder: Path) -> None:
    file = write_raising_environment("raising_game", folder)
    said = refusal_of("check", "raising_game:RaisingGameEnvironment")
    assert "- step: Sample 0, turn 1, reply '': step raised ValueError: invalid literal for int()" in said
    assert f'File "{file}"' in said
    assert "right = int(reply) == int(extra_env_info.secret)" in said


@pytest.mark.usefixtures("folder")
def test_each_command_says_it_as_json_if_told_to(capsys: pytest.CaptureFixture[str]) -> None:
    written = json.loads(said_by(capsys, "init", "json-game", "--json"))
    assert written == {"import_path": "json_game:JsonGameEnvironment", "files": ["json_game.py", "test_json_game.py"]}
    check = ["check", written["import_path"], "--samples", "2", "--json"]
    assert json.loads(said_by(capsys, *check)) == {"import_path": check[1], "samples": 2, "findings": []}


def test_findings_are_a_json_document_and_exit_code_1(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_raising_environment("wrong_game", folder)
    with pytest.raises(SystemExit, match="1"):
        main(["check", "wrong_game:WrongGameEnvironment", "--json"])
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert findings[0]["rule"] == "step"
    assert findings[0]["message"].startswith("Sample 0, turn 1, reply '': step raised ValueError")


def test_an_environment_that_cannot_be_loaded_is_refused() -> None:
    refusal = refusal_of("check", "nowhere:Game")
    assert refusal.startswith("nowhere:Game cannot be imported: there is no module nowhere.")
