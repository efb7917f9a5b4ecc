"""The sandboxes behind a stand-in: what is at the company, in this process."""

import asyncio
import pickle
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from deployments.sandbox.interface import SandboxLost
from deployments.sandbox.providers.interface import ExecResult, RunningSandbox, SandboxFile, SandboxSpec
from deployments.sandbox.providers.local import LocalProvider

KNOWN_IMAGE = "debian:12-slim"


class Gone(Exception):
    """There is no such sandbox, or none any more."""


class NoSuchImage(Exception):
    pass


@dataclass
class Held:
    sandbox: RunningSandbox
    labels: Any


class World:
    def __init__(self) -> None:
        self.provider = LocalProvider()
        self.held: dict[str, Held] = {}
        self.snapshots: dict[str, str] = {}
        self.folder = Path(tempfile.mkdtemp())

    async def create(self, image: str | Path, environment: dict[str, str], labels: Any) -> str:
        """From an image, a snapshot, or the folder with a Dockerfile. Raises `NoSuchImage` or `SandboxRefused`."""
        if isinstance(image, Path):
            spec = SandboxSpec(folder=image, environment=environment)
        elif image in self.snapshots:
            spec = SandboxSpec(image=self.snapshots[image], environment=environment)
        elif image == KNOWN_IMAGE:
            (self.folder / "Dockerfile").write_text("FROM debian:12-slim\nWORKDIR /app\n")
            spec = SandboxSpec(folder=self.folder, environment=environment)
        else:
            raise NoSuchImage(image)
        sandbox = await self.provider.create(spec)
        self.held[sandbox.id] = Held(sandbox, labels)
        return sandbox.id

    async def run(self, sandbox_id: str, line: str, stdin: bytes = b"") -> ExecResult:
        """Raises `Gone`."""
        try:
            return await self._sandbox(sandbox_id).exec(["sh", "-c", line], stdin=stdin)
        except SandboxLost as error:
            raise Gone(sandbox_id) from error

    async def put(self, sandbox_id: str, path: str, content: bytes) -> None:
        await self._sandbox(sandbox_id).write_files({path: SandboxFile(bytes(content))})

    async def get(self, sandbox_id: str, path: str) -> bytes:
        content = await self._sandbox(sandbox_id).read_file(path)
        assert content is not None
        return content

    async def parts(self, sandbox_id: str, path: str) -> AsyncIterator[bytes]:
        yield await self.get(sandbox_id, path)

    async def snapshot(self, sandbox_id: str, name: str) -> str:
        self.snapshots[name] = await self._sandbox(sandbox_id).snapshot()
        return name

    async def labels(self) -> dict[str, Any]:
        return {sandbox_id: held.labels for sandbox_id, held in self.held.items()}

    async def destroy(self, sandbox_id: str) -> None:
        """Raises `Gone`."""
        sandbox = self._sandbox(sandbox_id)
        del self.held[sandbox_id]
        await sandbox.destroy()

    def close(self) -> None:
        self.provider.close()
        shutil.rmtree(self.folder)

    def _sandbox(self, sandbox_id: str) -> RunningSandbox:
        if sandbox_id not in self.held:
            raise Gone(sandbox_id)
        return self.held[sandbox_id].sandbox


class FarWorld:
    """Takes the place of a `World` that is in another process, for the stand-ins of SDKs in this one."""

    def __init__(self, address: str) -> None:
        self._address = address

    def ask(self, name: str, *arguments: Any) -> Any:
        with socket.socket(socket.AF_UNIX) as stream:
            stream.connect(self._address)
            stream.sendall(pickle.dumps((name, arguments)))
            stream.shutdown(socket.SHUT_WR)
            answer = pickle.loads(stream.makefile("rb").read())
        if isinstance(answer, Exception):
            raise answer
        return answer

    @property
    def held(self) -> dict[str, Held]:
        found = self.ask("labels").items()
        return {sandbox_id: Held(None, labels) for sandbox_id, labels in found}  # type: ignore[arg-type]

    async def parts(self, sandbox_id: str, path: str) -> AsyncIterator[bytes]:
        yield await self.get(sandbox_id, path)

    def __getattr__(self, name: str) -> Any:
        return partial(asyncio.to_thread, self.ask, name)


@asynccontextmanager
async def reachable(folder: Path) -> AsyncIterator[Path]:
    """Answers the `FarWorld`s of other processes within the block. Yields the socket."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        name, arguments = pickle.loads(await reader.read())
        try:
            answer = await getattr(world(), name)(*arguments)
        except Exception as error:  # noqa: BLE001 - it is raised over there
            answer = error
        writer.write(pickle.dumps(answer))
        writer.close()

    async with await asyncio.start_unix_server(connected, folder / "world.sock"):
        yield folder / "world.sock"


ASKED: list[dict[str, Any]] = []
"""The limits that stand-ins were asked for, by the names that these have for them."""
WORLDS: list[World] = []
"""The last one is the present one."""


def world() -> World:
    return WORLDS[-1]
