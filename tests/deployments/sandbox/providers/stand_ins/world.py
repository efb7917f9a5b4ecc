"""The sandboxes behind a stand-in: what is at the company, in this process."""

import shutil
import tempfile
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


class World:
    def __init__(self) -> None:
        self.provider = LocalProvider()
        self.held: dict[str, RunningSandbox] = {}
        self.folder = Path(tempfile.mkdtemp())

    async def create(self, image: str | Path, environment: dict[str, str]) -> str:
        """From an image, or the folder with a Dockerfile. Raises `NoSuchImage` or `SandboxRefused`."""
        if isinstance(image, Path):
            spec = SandboxSpec(folder=image, environment=environment)
        elif image == KNOWN_IMAGE:
            (self.folder / "Dockerfile").write_text("FROM debian:12-slim\nWORKDIR /app\n")
            spec = SandboxSpec(folder=self.folder, environment=environment)
        else:
            raise NoSuchImage(image)
        sandbox = await self.provider.open(spec)
        self.held[sandbox.id] = sandbox
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

    async def destroy(self, sandbox_id: str) -> None:
        """Raises `Gone`."""
        sandbox = self._sandbox(sandbox_id)
        del self.held[sandbox_id]
        await sandbox.close()

    def close(self) -> None:
        self.provider.close()
        shutil.rmtree(self.folder)

    def _sandbox(self, sandbox_id: str) -> RunningSandbox:
        if sandbox_id not in self.held:
            raise Gone(sandbox_id)
        return self.held[sandbox_id]


ASKED: list[dict[str, Any]] = []
"""The limits that stand-ins were asked for, by the names that these have for them."""
WORLDS: list[World] = []
"""The last one is the present one."""


def world() -> World:
    return WORLDS[-1]
