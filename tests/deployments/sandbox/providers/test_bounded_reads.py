"""Files and outputs of a sandbox that have no end: no provider reads much more of them than it may give."""

import asyncio
import struct
import subprocess
import tarfile
import tracemalloc
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from deployments.sandbox.interface import MIB, SandboxLost
from deployments.sandbox.providers.docker import DockerProvider, _DockerSandbox
from deployments.sandbox.providers.interface import (
    LARGEST_FILE_BYTES,
    LARGEST_OUTPUT_BYTES,
    ExecResult,
    SandboxFile,
    SandboxRefused,
    SandboxSpec,
)
from deployments.sandbox.providers.kubernetes import KubernetesProvider, _KubernetesSandbox
from deployments.sandbox.providers.local import LocalProvider
from deployments.sandbox.providers.shell import PART_BYTES, ShellSandbox, _end_of
from tests.deployments.sandbox.providers.opened import opened
from tests.deployments.sandbox.providers.stand_ins.docker_engine import Container, Engine, message
from tests.deployments.sandbox.providers.stand_ins.world import KNOWN_IMAGE
from tests.deployments.sandbox.providers.test_limits import provided

# Gigabytes are read.
pytestmark = [pytest.mark.slow, pytest.mark.true_clock]
PATH = "/logs/verifier/reward.json"
REFUSED = f"^{PATH} cannot be read: it is not a file of at most {LARGEST_FILE_BYTES} bytes"
BUFFERED_BYTES = 8 * MIB
"""Bytes that may be under way in sockets."""
SPEC = SandboxSpec(image=KNOWN_IMAGE, network=True)


def measured(work: Coroutine[Any, Any, Any]) -> tuple[Any, int]:
    """What the work returns, and the most bytes that Python has held at once for it."""
    tracemalloc.start()
    try:
        return asyncio.run(work), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@asynccontextmanager
async def docker_sandbox(folder: Path, engine: Engine) -> AsyncIterator[_DockerSandbox]:
    async with provided("docker", folder, engine) as provider:
        assert isinstance(provider, DockerProvider)
        yield _DockerSandbox(provider, "x", SPEC)


class Talking(Engine):
    """An engine with a container whose command writes without an end."""

    async def make_exec(self, _request: Request) -> Response:
        return JSONResponse({"Id": "x"})

    async def start_exec(self, _request: Request) -> Response:
        async def frames() -> AsyncIterator[bytes]:
            for _ in range(200):
                for stream in (1, 2):
                    yield struct.pack(">BxxxI", stream, MIB) + bytes(MIB)
            yield struct.pack(">BxxxI", 1, 4) + b"end\n"

        self.codes["x"] = 0
        return StreamingResponse(frames(), media_type="application/vnd.docker.raw-stream")


def test_of_an_output_without_an_end_docker_leaves_the_last_bytes(tmp_path: Path) -> None:
    async def run() -> ExecResult:
        async with docker_sandbox(tmp_path, Talking()) as sandbox:
            return await sandbox.run_shell("yes", None)

    done, peak = measured(run())
    assert peak < 20 * LARGEST_OUTPUT_BYTES
    assert (len(done.stdout), done.stdout[-5:]) == (LARGEST_OUTPUT_BYTES, "\0end\n")
    assert len(done.stderr) == LARGEST_OUTPUT_BYTES


class Archiving(Engine):
    """An engine whose only file has a size. Counts what it sends of its archive."""

    def __init__(self, kind: bytes, size: int) -> None:
        super().__init__()
        self.containers = {"x": Container("x", {})}
        member = tarfile.TarInfo("reward.json")
        member.type, member.size = kind, size
        self.head, self.size, self.sent = member.tobuf(), size, 0

    async def archive(self, request: Request) -> Response:
        assert request.headers["accept-encoding"] == "identity"

        async def parts() -> AsyncIterator[bytes]:
            yield self.head
            while self.sent < self.size:
                await asyncio.sleep(0)
                self.sent += MIB
                yield bytes(MIB)

        return StreamingResponse(parts(), media_type="application/x-tar")


async def read_by_docker(engine: Engine, folder: Path) -> bytes | None:
    async with docker_sandbox(folder, engine) as sandbox:
        return await sandbox.read_file(PATH)


@pytest.mark.parametrize(
    ("kind", "size"),
    [(tarfile.REGTYPE, 3 * 2**30), (tarfile.REGTYPE, LARGEST_FILE_BYTES + 1), (tarfile.DIRTYPE, 2**40)],
    ids=["a file", "one byte more", "a folder of many files"],
)
def test_an_archive_of_docker_is_read_to_the_bound_alone(kind: bytes, size: int, tmp_path: Path) -> None:
    engine = Archiving(kind, size)

    async def refused() -> None:
        with pytest.raises(SandboxRefused, match=REFUSED):
            await read_by_docker(engine, tmp_path)

    assert measured(refused())[1] < 3 * LARGEST_FILE_BYTES
    assert engine.sent < LARGEST_FILE_BYTES + BUFFERED_BYTES


def test_the_largest_file_is_read_from_docker_and_no_broken_archive(tmp_path: Path) -> None:
    content = asyncio.run(read_by_docker(Archiving(tarfile.REGTYPE, LARGEST_FILE_BYTES), tmp_path))
    assert content == bytes(LARGEST_FILE_BYTES)
    engine = Archiving(tarfile.REGTYPE, 0)
    engine.head = b"x" * 512
    with pytest.raises(SandboxLost, match=f"The engine's archive of {PATH} cannot be read"):
        asyncio.run(read_by_docker(engine, tmp_path))


class Recording(Archiving):
    """Keeps what it is asked to run."""

    async def make_exec(self, request: Request) -> Response:
        self.asked = await request.json()
        return message(409, "not now")


async def test_the_variables_of_a_command_are_no_arguments_of_docker(tmp_path: Path) -> None:
    engine = Recording(tarfile.REGTYPE, 0)
    async with docker_sandbox(tmp_path, engine) as sandbox:
        with pytest.raises(SandboxLost):
            await sandbox.exec(["test.sh", "a b"], environment={"KEY": "secret"})
    assert engine.asked["Env"] == ["KEY=secret"]
    assert "secret" not in str(engine.asked["Cmd"])
    assert engine.asked["Cmd"][-2:] == ["test.sh", "a b"]


class Scripted(ShellSandbox):
    """A sandbox whose programs say what the test says, for each part of a file."""

    def __init__(self, part: ExecResult) -> None:
        self.part, self.parts = part, 0

    async def run_shell(self, line: str, timeout_s: float | None) -> ExecResult:
        self.parts += 1
        return self.part


FULL = ExecResult(0, "A" * (PART_BYTES // 3 * 4) + "AAA=", "")
"""A part of `PART_BYTES` in base64."""


def test_a_file_without_an_end_is_read_to_the_bound_alone() -> None:
    sandbox = Scripted(FULL)  # type: ignore[abstract]
    with pytest.raises(SandboxRefused, match=REFUSED):
        asyncio.run(sandbox.read_file(PATH))
    assert sandbox.parts == LARGEST_FILE_BYTES // PART_BYTES + 1


@pytest.mark.parametrize(
    ("part", "sentence"),
    [
        (ExecResult(45, "", ""), REFUSED),
        (ExecResult(0, "A", ""), "cannot be read: base64 of the sandbox wrote something else"),
        (ExecResult(127, "", "sh: base64: not found"), "cannot be read: sh: base64: not found"),
        (ExecResult(0, "", "sh: head: not found"), "cannot be read: sh: head: not found"),
        (ExecResult(0, "AAAA", "tail: input/output error\npart-is-read"), "cannot be read: tail: input/output error"),
    ],
)
def test_programs_of_a_sandbox_that_say_something_else_give_no_file(part: ExecResult, sentence: str) -> None:
    with pytest.raises(SandboxRefused, match=sentence):
        asyncio.run(Scripted(part).read_file(PATH))  # type: ignore[abstract]


class OneStream(ShellSandbox):
    """A sandbox whose backend gives what a command writes to stderr as its stdout."""

    async def run_shell(self, line: str, timeout_s: float | None) -> ExecResult:
        done = await asyncio.to_thread(
            subprocess.run, ["sh", "-c", line], check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        return ExecResult(done.returncode, done.stdout, "")


@pytest.mark.parametrize("size", [0, 3, PART_BYTES, 2 * PART_BYTES + 1])
def test_a_file_is_read_where_both_streams_are_one(size: int, tmp_path: Path) -> None:
    content = bytes(range(256)) * (size // 256) + bytes(size % 256)
    (tmp_path / "file").write_bytes(content)
    sandbox = OneStream()  # type: ignore[abstract]
    assert asyncio.run(sandbox.read_file(str(tmp_path / "file"))) == content
    assert asyncio.run(sandbox.read_file(str(tmp_path / "none"))) is None


def test_of_an_output_without_an_end_kubectl_leaves_the_last_bytes(tmp_path: Path) -> None:
    program = tmp_path / "kubectl"
    program.write_text("#!/bin/sh\nhead -c 200000000 /dev/zero; head -c 200000000 /dev/zero >&2; cat; echo end >&2\n")
    program.chmod(0o755)
    sandbox = _KubernetesSandbox(KubernetesProvider(kubectl=str(program)), "x", SPEC)
    done, peak = measured(sandbox.run_shell("true", None, b"given"))
    assert peak < 20 * LARGEST_OUTPUT_BYTES
    assert (done.exit_code, len(done.stdout), len(done.stderr)) == (0, LARGEST_OUTPUT_BYTES, LARGEST_OUTPUT_BYTES)
    assert (done.stdout[-7:], done.stderr[-5:]) == ("\0\0given", "\0end\n")


@pytest.mark.parametrize("text", ["", "é" * 1000, "\ud800" * LARGEST_OUTPUT_BYTES])
def test_the_end_of_an_output_has_no_more_bytes_than_it_may(text: str) -> None:
    assert len(_end_of(text).encode(errors="surrogatepass")) <= LARGEST_OUTPUT_BYTES
    assert _end_of(text[:1000]) == text[:1000]


@pytest.mark.long
async def test_a_local_sandbox_gives_the_largest_file_and_none_larger(provider: LocalProvider, tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM debian\n")
    async with opened(provider, SandboxSpec(folder=tmp_path)) as sandbox:
        largest = f"mkdir -p /logs/verifier; head -c {LARGEST_FILE_BYTES} /dev/zero > {PATH}"
        assert (await sandbox.exec(["sh", "-c", largest])).exit_code == 0
        assert await sandbox.read_file(PATH) == bytes(LARGEST_FILE_BYTES)
        for more in (f"echo >> {PATH}", f"rm {PATH}; truncate -s 1T {PATH}"):
            assert (await sandbox.exec(["sh", "-c", more])).exit_code == 0
            with pytest.raises(SandboxRefused, match=REFUSED):
                await sandbox.read_file(PATH)
        await sandbox.write_files({PATH: SandboxFile(b"1")})
        assert await sandbox.read_file(PATH) == b"1"
