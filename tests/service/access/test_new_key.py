"""The command that makes a key: it prints the key once, and the file gets the hash alone."""

import stat
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from service.access.keys import Caller, parsed_keys
from service.access.new_key import _main

app = typer.Typer()
app.command()(_main)


def made(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def test_a_key_is_printed_and_its_hash_is_in_a_file_of_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    first = made("team", "--scope", "rollout", "--scope", "read", "--file", str(path))
    keys = [result.stdout.strip() for result in (first, made("other", "--scope", "admin", "--file", str(path)))]
    assert [parsed_keys(path.read_bytes()).caller_with(key) for key in keys] == [
        Caller("team", frozenset({"rollout", "read"})),
        Caller("other", frozenset({"admin"})),
    ]
    assert all(key not in path.read_text() for key in keys)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_the_comments_and_keys_of_a_file_stay(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text("# Ours.\nkeys:\n- {name: old, sha256: " + "1f" * 32 + ", scopes: [read]}")
    before = path.read_text()
    assert made("new", "--scope", "read", "--file", str(path)).exit_code == 0
    assert path.read_text().startswith(before)
    assert len(parsed_keys(path.read_bytes())) == 2


def test_without_the_name_of_a_file_it_is_keys_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    key = made("team", "--scope", "read").stdout.strip()
    assert parsed_keys((tmp_path / "keys.yaml").read_bytes()).caller_with(key) == Caller("team", frozenset({"read"}))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("a b", "--scope", "read"), "keys.0.name"), (("team", "--scope", "root"), "keys.0.scopes.0")],
)
def test_a_wrong_entry_is_refused_and_nothing_written(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    result = made(*arguments, "--file", str(tmp_path / "keys.yaml"))
    assert result.exit_code == 2
    assert message in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_holds_something_else_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"keys": []}')
    assert made("team", "--scope", "read", "--file", str(path)).exit_code == 2
    assert path.read_text() == '{"keys": []}'
