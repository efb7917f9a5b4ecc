"""The token of the Ray cluster, and the file that holds it."""

import os
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from ray import _raylet

from service.startup.config import ServiceNotStarted
from service.startup.local_service import _make_token, require_cluster_token

RAYLET: Any = _raylet


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    yield
    monkeypatch.undo()
    RAYLET.Config.initialize("")


def permissions(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_token_is_made_that_its_owner_alone_can_read_and_ray_uses_it(tmp_path: Path) -> None:
    require_cluster_token()
    file = tmp_path / ".ray" / "auth_token"
    assert (permissions(file), permissions(file.parent)) == (0o600, 0o700)
    assert len(bytes.fromhex(file.read_text())) == 32
    assert os.environ["RAY_AUTH_MODE"] == "token"
    assert RAYLET.get_authentication_mode() == RAYLET.AuthenticationMode.TOKEN


def test_a_token_that_is_there_stays_and_is_closed_to_others(tmp_path: Path) -> None:
    file = tmp_path / ".ray" / "auth_token"
    file.parent.mkdir()
    file.write_text("a token of before")
    file.chmod(0o644)
    require_cluster_token()
    assert (file.read_text(), permissions(file)) == ("a token of before", 0o600)


def test_the_token_is_kept_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "elsewhere" / "token"))
    require_cluster_token()
    assert permissions(tmp_path / "elsewhere" / "token") == 0o600
    assert not (tmp_path / ".ray").exists()


def test_a_token_in_the_environment_needs_no_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "a token")
    require_cluster_token()
    assert not (tmp_path / ".ray").exists()


def test_services_that_start_at_once_have_one_token(tmp_path: Path) -> None:
    file = tmp_path / "token"
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(_make_token, [file] * 32))
    assert len(file.read_text()) == 64
    assert list(tmp_path.iterdir()) == [file]


def test_no_authentication_is_warned_of(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    require_cluster_token()
    assert "whoever reaches a port of Ray can run code here" in caplog.text
    assert RAYLET.get_authentication_mode() == RAYLET.AuthenticationMode.DISABLED


def test_a_token_not_kept_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "file" / "token"))
    with pytest.raises(ServiceNotStarted, match="Name another file in RAY_AUTH_TOKEN_PATH"):
        require_cluster_token()
