"""What a folder holds is read once for each state of its files."""

import asyncio
import os
from pathlib import Path
from unittest.mock import Mock, call

import pytest

from deployments.sandbox.providers.dockerfile import build_plan
from deployments.sandbox.providers.interface import SandboxRefused, SandboxSpec, files_below, state_of
from deployments.sandbox.providers.local import LocalProvider
from tests.deployments.sandbox.providers.opened import opened
from tests.virtual_time import runs


def folder_with(folder: Path, **files: bytes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def test_the_state_of_a_folder_changes_with_its_files_and_their_times(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "f", a=b"1", b=b"2")
    states = [state_of(folder)]
    assert state_of(folder) == states[0]
    for change in (
        lambda: os.utime(folder / "a", ns=(1, 1)),
        lambda: (folder / "b").write_bytes(b"3"),
        lambda: (folder / "b").chmod(0o755),
        lambda: (folder / "in").symlink_to("a"),
        lambda: (folder / "in").rename(folder / "to"),
    ):
        change()
        states.append(state_of(folder))
    assert len({*states}) == len(states)


def test_a_link_out_of_a_folder_is_not_followed(tmp_path: Path) -> None:
    folder_with(tmp_path / "out", x=b"1")
    folder = folder_with(tmp_path / "f")
    (folder / "out").symlink_to("../out/x")
    before = state_of(folder)
    (tmp_path / "out" / "x").write_bytes(b"22")
    assert state_of(folder) == before
    with pytest.raises(SandboxRefused, match="is a link out of"):
        files_below(folder, "/")


def test_a_folder_that_cannot_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path) -> str:
        raise PermissionError(13, "Permission denied", str(path))

    folder = folder_with(tmp_path / "f", a=b"")
    monkeypatch.setattr(Path, "lstat", refused)
    with pytest.raises(SandboxRefused, match=r"/f cannot be read: .*Permission denied: '.*/f/a'\.$"):
        state_of(folder)


@pytest.mark.slow
@runs
async def test_further_sandboxes_of_a_folder_read_none_of_its_files(
    provider: LocalProvider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder_with(tmp_path, Dockerfile=b"FROM debian\nCOPY data /data\n", data=b"1")
    plan = Mock(wraps=build_plan)
    monkeypatch.setattr("deployments.sandbox.providers.local.build_plan", plan)
    at_once = await asyncio.gather(*(provider.open(SandboxSpec(folder=tmp_path)) for _ in range(4)))
    await asyncio.gather(*(sandbox.close() for sandbox in at_once))
    for content in (b"1", b"2"):
        if content == b"2":
            (tmp_path / "data").write_bytes(content)
        for _ in range(2):
            async with opened(provider, SandboxSpec(folder=tmp_path)) as sandbox:
                assert await sandbox.read_file("/data") == content
    assert plan.call_args_list == [call(tmp_path)] * 2
