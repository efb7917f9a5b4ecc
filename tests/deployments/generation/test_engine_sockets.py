"""In which folder an engine makes its sockets, and whose folders are removed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from deployments.generation import engine_sockets
from deployments.generation.engine_sockets import SOCKETS_VARIABLE, claim_socket_folder
from deployments.shared_memory import MARK, owner_of


@pytest.fixture(autouse=True)
def unset_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SOCKETS_VARIABLE, "none")
    monkeypatch.delenv(SOCKETS_VARIABLE)


def test_the_sockets_of_a_killed_replica_are_removed_and_all_else_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_sockets, "LONGEST_ADDRESS", 1000)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        gone = tmp_path / f"{MARK}-{owner_of(process.pid)}"
        process.communicate(b"\n")
    elsewhere = tmp_path / f"{MARK}-1-2-3"
    for folder in (gone, elsewhere):
        folder.mkdir()
        (folder / "socket").touch()

    claim_socket_folder(tmp_path)

    own = tmp_path / f"{MARK}-{owner_of(os.getpid())}"
    assert set(tmp_path.iterdir()) == {elsewhere, own}
    assert os.environ[SOCKETS_VARIABLE] == str(own)


def test_a_folder_whose_sockets_would_have_too_long_paths_is_not_used(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 60)
    deep.mkdir()
    claim_socket_folder(deep)
    assert SOCKETS_VARIABLE not in os.environ
    assert list(deep.iterdir()) == []


def test_a_folder_that_the_config_names_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SOCKETS_VARIABLE, "/run/sockets")
    claim_socket_folder(tmp_path)
    assert os.environ[SOCKETS_VARIABLE] == "/run/sockets"
    assert list(tmp_path.iterdir()) == []
