"""What a folder holds is read once for each state of its files, a part at a time, and beside the event loop."""

import asyncio
import os
import threading
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.sandbox.interface import MIB
from deployments.sandbox.providers import files
from deployments.sandbox.providers.dockerfile import BuildPlan, build_plan
from deployments.sandbox.providers.files import _content_of, _digest, name_of
from deployments.sandbox.providers.interface import ProviderUnusable, SandboxRefused, SandboxSpec
from deployments.sandbox.providers.local import LocalProvider


class Reads:
    """The files that were read, and by which threads."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.paths: list[str] = []
        self.threads: set[int] = set()
        patch.setattr(files, "_content_of", self._read)

    def _read(self, path: Path) -> str:
        self.paths.append(path.name)
        self.threads.add(threading.get_ident())
        return _content_of(path)

    def taken(self) -> list[str]:
        taken, self.paths = self.paths, []
        return taken


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    return Reads(monkeypatch)


def folder_with(folder: Path, **files: bytes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def test_a_folder_is_read_once_for_each_state(tmp_path: Path, reads: Reads) -> None:
    folder = folder_with(tmp_path / "f", a=b"1", b=b"2")

    async def run() -> None:
        name = await name_of(folder)
        assert reads.taken() == ["a", "b"]
        assert reads.threads.isdisjoint({threading.get_ident()})
        assert await name_of(folder) == name
        assert reads.taken() == []
        os.utime(folder / "a", ns=(1, 1))
        assert await name_of(folder) == name
        assert reads.taken() == ["a", "b"]
        (folder / "a").write_bytes(b"3")
        os.utime(folder / "a", ns=(1, 1))
        assert await name_of(folder) != name
        assert reads.taken() == ["a", "b"]

    asyncio.run(run())


FILES = st.dictionaries(st.sampled_from(["a", "b", "c"]), st.tuples(st.binary(max_size=3), st.booleans()), max_size=3)


@given(first=FILES, second=FILES)
def test_two_folders_have_one_name_if_they_have_the_same_files_and_only_then(
    tmp_path_factory: pytest.TempPathFactory,
    first: dict[str, tuple[bytes, bool]],
    second: dict[str, tuple[bytes, bool]],
) -> None:
    names = []
    for held in (first, second):
        folder = folder_with(tmp_path_factory.mktemp("f"))
        for name, (content, is_executable) in held.items():
            (folder / name).write_bytes(content)
            (folder / name).chmod(0o755 if is_executable else 0o644)
        names.append(_digest(folder, _content_of))
    assert (names[0] == names[1]) == (first == second)


def test_a_link_is_its_target_and_what_it_leads_to_in_the_folder(tmp_path: Path, reads: Reads) -> None:
    folder_with(tmp_path / "out", x=b"1")
    folder = folder_with(tmp_path / "f", a=b"1")
    (folder / "in").symlink_to("a")
    (folder / "out").symlink_to("../out/x")
    before = asyncio.run(name_of(folder))
    assert reads.taken() == ["a", "in"]
    (folder / "out").unlink()
    (folder / "out").symlink_to("../out/y")
    assert asyncio.run(name_of(folder)) != before


def test_a_large_file_is_read_a_part_at_a_time(tmp_path: Path) -> None:
    with (folder_with(tmp_path / "f") / "large").open("wb") as file:
        file.truncate(64 * MIB)
    tracemalloc.start()
    try:
        _digest(tmp_path / "f", _content_of)
        assert tracemalloc.get_traced_memory()[1] < 2 * MIB
    finally:
        tracemalloc.stop()


def test_a_file_that_cannot_be_read_refuses_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path) -> str:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(files, "_content_of", refused)
    with pytest.raises(SandboxRefused, match=r"/f cannot be read: .*Permission denied: '.*/f/a'\.$"):
        asyncio.run(name_of(folder_with(tmp_path / "f", a=b"")))


def test_further_sandboxes_of_a_folder_read_none_of_its_files(
    tmp_path: Path, reads: Reads, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder_with(tmp_path, Dockerfile=b"FROM debian\nCOPY data /data\n", data=b"1")
    plans: list[Path] = []

    def planned(folder: Path) -> BuildPlan:
        plans.append(folder)
        return build_plan(folder)

    monkeypatch.setattr("deployments.sandbox.providers.local.build_plan", planned)

    async def run() -> list[bytes | None]:
        try:
            provider = LocalProvider()
        except ProviderUnusable as error:
            pytest.skip(str(error))
        contents = []
        at_once = await asyncio.gather(*(provider.open(SandboxSpec(folder=tmp_path)) for _ in range(4)))
        await asyncio.gather(*(sandbox.close() for sandbox in at_once))
        for content in (None, None, b"2", None):
            if content is not None:
                (tmp_path / "data").write_bytes(content)
            sandbox = await provider.open(SandboxSpec(folder=tmp_path))
            contents.append(await sandbox.read_file("/data"))
            await sandbox.close()
        provider.close()
        return contents

    assert asyncio.run(run()) == [b"1", b"1", b"2", b"2"]
    assert plans == [tmp_path, tmp_path]
    assert reads.taken() == ["Dockerfile", "data"] * 2
