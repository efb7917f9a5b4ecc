"""Sandboxes of Daytona, by its Python SDK (`pip install daytona`, 0.226): `daytona`.

The key is in `DAYTONA_API_KEY`.
"""

import math
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from functools import cached_property
from typing import Any
from uuid import uuid4

from daytona import (
    AsyncDaytona,
    CreateSandboxFromImageParams,
    CreateSandboxFromSnapshotParams,
    DaytonaError,
    DaytonaNotFoundError,
    Image,
    Resources,
)

from deployments.sandbox.interface import SandboxLost
from deployments.sandbox.providers.interface import (
    OWNER_LABEL,
    ExecResult,
    RunningSandbox,
    SandboxRefused,
    SandboxSpec,
)
from deployments.sandbox.providers.labelled import FOLDER
from deployments.sandbox.providers.shell import ShellProvider, ShellSandbox

SNAPSHOT = "rollout-snapshot-"
NEVER, NO_LIMIT = 0, 0
MOST_STDERR_BYTES = 65536


@contextmanager
def translated() -> Iterator[None]:
    """The SDK's exceptions as those of the interface."""
    try:
        yield
    except DaytonaError as error:
        if getattr(error, "status_code", None) in (400, 422):
            raise SandboxRefused(f"Daytona refuses it: {error}") from error
        raise SandboxLost(f"Daytona: {type(error).__name__}: {error}") from error


class DaytonaProvider(ShellProvider):
    name = "daytona"

    def __init__(self) -> None:
        super().__init__({})

    @cached_property
    def client(self) -> AsyncDaytona:
        return AsyncDaytona()

    async def create(self, spec: SandboxSpec) -> RunningSandbox:
        """See `SandboxProvider.create`."""
        self.refuse_folders(spec)
        self.watched()
        common: dict[str, Any] = {
            "env_vars": dict(spec.environment),
            "labels": {OWNER_LABEL: self.owner},
            "network_block_all": not spec.network,
            "auto_stop_interval": NEVER,
            "ttl_minutes": math.ceil(spec.lifetime_s / 60),
        }
        if spec.image is not None and spec.image.startswith(SNAPSHOT):
            sizes = ("cpus", "memory_mb", "storage_mb")
            spec.refuse_limits("a sandbox of a snapshot has the size of the one that it was taken of", *sizes)
            params: Any = CreateSandboxFromSnapshotParams(snapshot=spec.image, **common)
        else:
            gigabytes = [None if size is None else math.ceil(size / 1024) for size in (spec.memory_mb, spec.storage_mb)]
            cores = None if spec.cpus is None else math.ceil(spec.cpus)
            image = spec.image if spec.folder is None else Image.from_dockerfile(spec.folder / "Dockerfile")
            resources = Resources(cpu=cores, memory=gigabytes[0], disk=gigabytes[1])
            params = CreateSandboxFromImageParams(image=image, resources=resources, **common)
        with translated():
            sandbox = await self.client.create(params, timeout=spec.build_timeout_s)
        return DaytonaSandbox(self, sandbox.id, spec, sandbox)

    async def owned(self) -> dict[str, str | None]:
        """See `LabelledProvider.owned`."""
        with translated():
            return {sandbox.id: sandbox.labels.get(OWNER_LABEL) async for sandbox in self.client.list()}

    async def remove(self, sandbox_id: str) -> None:
        """See `LabelledProvider.remove`."""
        with translated():
            try:
                await self.client.delete(await self.client.get(sandbox_id), wait=True)
            except DaytonaNotFoundError:
                return


class DaytonaSandbox(ShellSandbox):
    async def run_shell(self, line: str, timeout_s: float | None) -> ExecResult:  # noqa: ARG002 - it is ended from here
        """See `ShellSandbox.run_shell`. The SDK gives stdout alone, so stderr takes the way of a file."""
        path = f"{FOLDER}/{uuid4().hex}.stderr"
        with translated():
            # The SDK's own shell may be any.
            quoted = line.replace("'", "'\\''")
            done = await self._handle.process.exec(f"mkdir -p {FOLDER}; sh -c '{quoted}' 2> {path}", timeout=NO_LIMIT)
            said = await self._handle.process.exec(f"tail -c {MOST_STDERR_BYTES} {path}; rm -f {path}")
        return ExecResult(done.exit_code, done.result, said.result)

    async def put(self, path: str, content: bytes) -> None:
        """See `LabelledSandbox.put`."""
        with translated():
            await self._handle.fs.upload_file(content, path)

    async def parts_of(self, path: str) -> AsyncGenerator[bytes, None]:
        """See `ShellSandbox.parts_of`."""
        with translated():
            async with aclosing(await self._handle.fs.download_file_stream(path)) as parts:
                async for part in parts:
                    yield part

    async def snapshot(self) -> str:
        """See `RunningSandbox.snapshot`."""
        name = f"{SNAPSHOT}{uuid4().hex}"
        with translated():
            await self._handle.create_snapshot(name)
        return name
