"""Images of the provider `local`, whose files go while somebody is about to read them."""

import asyncio
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from deployments.sandbox.interface import MIB, SandboxLost
from deployments.sandbox.providers import local
from deployments.sandbox.providers.interface import SandboxFile, SandboxRefused, SandboxSpec
from deployments.sandbox.providers.local import LocalProvider
from deployments.sandbox.providers.local_sandbox import LocalRunningSandbox
from tests.deployments.sandbox.providers.opened import opened

# Sandboxes are started.
pytestmark = [pytest.mark.slow, pytest.mark.true_clock]


def folder(path: Path, name: str, run: str = "") -> SandboxSpec:
    (path / name).mkdir(exist_ok=True)
    (path / name / "Dockerfile").write_text(f"FROM debian\nRUN echo {name} > /name{run}\n")
    return SandboxSpec(folder=path / name)


def deleted_files() -> int:
    """Files without a name that this process has open."""
    files = [file for file in Path("/proc/self/fd").iterdir() if file.is_symlink()]
    return sum(str(file.readlink()).endswith("(deleted)") for file in files)


async def name_of(provider: LocalProvider, spec: SandboxSpec) -> bytes | None:
    async with opened(provider, spec) as sandbox:
        return await sandbox.read_file("/name")


@pytest.mark.parametrize("method", ["start", "close"])
async def test_an_image_forgotten_while_a_sandbox_starts_or_is_built_is_read(
    provider: LocalProvider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr(local, "MOST_IMAGES", 1)
    called, first = getattr(LocalRunningSandbox, method), folder(tmp_path, "first")
    if method == "start":
        assert await name_of(provider, first) == b"first\n"

    async def called_late(sandbox: LocalRunningSandbox) -> None:
        monkeypatch.setattr(LocalRunningSandbox, method, called)
        await called(sandbox)
        # Its image takes the place of the first one.
        await (await provider.open(folder(tmp_path, "second"))).close()

    monkeypatch.setattr(LocalRunningSandbox, method, called_late)
    for _ in range(2):
        assert await name_of(provider, first) == b"first\n"


async def test_an_image_by_name_is_refused_and_forgotten_files_are_gone(
    provider: LocalProvider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "MOST_IMAGES", 2)
    before = deleted_files()
    with pytest.raises(SandboxRefused, match=r"has no image 'debian'"):
        await provider.open(SandboxSpec(image="debian"))
    for name in ("first", "second", "third", "first"):
        assert await name_of(provider, folder(tmp_path, name)) == f"{name}\n".encode()
    assert deleted_files() - before == 2
    provider.close()
    assert deleted_files() == before


async def test_too_large_files_are_refused_and_the_sandbox_goes_on(provider: LocalProvider, tmp_path: Path) -> None:
    async with opened(provider, replace(folder(tmp_path, "small"), storage_mb=8)) as sandbox:
        with pytest.raises(SandboxRefused, match=r"(?s)The files cannot be written in the sandbox: .*No space left"):
            await sandbox.write_files({"/large": SandboxFile(bytes(40 * MIB)), "/other": SandboxFile(b"x")})
        assert await sandbox.read_file("/name") == b"small\n"


def test_folders_whose_names_have_wildcards_are_no_files_of_an_image(provider: LocalProvider, tmp_path: Path) -> None:
    # The sandbox's user may not enter `tmp_path`.
    with tempfile.TemporaryDirectory(prefix="run[1]-") as read_only:
        Path(read_only).chmod(0o755)
        (Path(read_only) / "data").write_text("data")
        spec = replace(folder(tmp_path, "first"), read_only_folders=(read_only,))
        assert asyncio.run(name_of(provider, spec)) == b"first\n"


async def test_a_shell_that_does_not_answer_is_a_lost_sandbox(provider: LocalProvider, tmp_path: Path) -> None:
    async with opened(provider, folder(tmp_path, "first")) as sandbox:
        assert isinstance(sandbox, LocalRunningSandbox)
        with pytest.raises(SandboxLost, match=r"did not answer within 0.2 s"):
            await sandbox.run_shell("sleep 60", 0.2)
