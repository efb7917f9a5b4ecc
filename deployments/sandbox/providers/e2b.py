"""Sandboxes of E2B, by its Python SDK (`pip install e2b`, 2.63): `e2b`. The key is in `E2B_API_KEY`.

A folder becomes a template, once for each content.
"""

import asyncio
import hashlib
import math
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager

from e2b import AsyncSandbox, AsyncTemplate, Template
from e2b.exceptions import (
    BuildException,
    InvalidArgumentException,
    NotFoundException,
    SandboxException,
    ServiceBusyException,
)
from e2b.sandbox.commands.command_handle import CommandExitException

from deployments.sandbox.interface import SandboxLost
from deployments.sandbox.providers.dockerfile import text_in
from deployments.sandbox.providers.folder_state import FolderStates
from deployments.sandbox.providers.interface import (
    OWNER_LABEL,
    ExecResult,
    RunningSandbox,
    SandboxRefused,
    SandboxSpec,
)
from deployments.sandbox.providers.shell import ShellProvider, ShellSandbox

SNAPSHOT = "snapshot:"
NO_LIMIT = 0


def is_snapshot(spec: SandboxSpec) -> bool:
    return spec.image is not None and spec.image.startswith(SNAPSHOT)


@contextmanager
def translated() -> Iterator[None]:
    """The SDK's exceptions as those of the interface."""
    try:
        yield
    except (BuildException, InvalidArgumentException) as error:
        raise SandboxRefused(f"E2B refuses it: {error}") from error
    except (SandboxException, ServiceBusyException) as error:
        raise SandboxLost(f"E2B: {type(error).__name__}: {error}") from error


class E2bProvider(ShellProvider):
    name = "e2b"

    def __init__(self) -> None:
        super().__init__({})
        self._building: dict[str, asyncio.Lock] = {}
        self._folders = FolderStates()

    async def create(self, spec: SandboxSpec) -> RunningSandbox:
        """See `SandboxProvider.create`."""
        self.refuse_folders(spec)
        spec.refuse_limits("E2B gives no sandbox a disk of its own size", "storage_mb")
        if is_snapshot(spec):
            spec.refuse_limits(
                "a sandbox of a snapshot has the size of the one that it was taken of", "cpus", "memory_mb"
            )
        self.watched()
        with translated():
            sandbox = await AsyncSandbox.create(
                template=await self._template(spec),
                timeout=math.ceil(spec.lifetime_s),
                metadata={OWNER_LABEL: self.owner},
                envs=dict(spec.environment),
                allow_internet_access=spec.network,
            )
        return E2bSandbox(self, sandbox.sandbox_id, spec, sandbox)

    async def _template(self, spec: SandboxSpec) -> str:
        if is_snapshot(spec):
            return str(spec.image).removeprefix(SNAPSHOT)
        if spec.folder is not None:
            content = (await self._folders.name_of(spec.folder)).encode()
        else:
            content = str(spec.image).encode()
        size = f"{spec.cpus}-{spec.memory_mb}".encode()
        name = f"rollout-{hashlib.sha256(content + size).hexdigest()[:32]}"
        async with self._building.setdefault(name, asyncio.Lock()):
            if not await AsyncTemplate.exists(name):
                if spec.folder is not None:
                    dockerfile = await asyncio.to_thread(text_in, spec.folder / "Dockerfile")
                    template = Template(file_context_path=str(spec.folder)).from_dockerfile(dockerfile)
                else:
                    template = Template().from_image(str(spec.image))
                async with asyncio.timeout(spec.build_timeout_s):
                    sizes = {
                        "cpu_count": None if spec.cpus is None else math.ceil(spec.cpus),
                        "memory_mb": spec.memory_mb,
                    }
                    await AsyncTemplate.build(template, name, **{key: size for key, size in sizes.items() if size})
        return name

    async def owned(self) -> dict[str, str | None]:
        """See `LabelledProvider.owned`."""
        found: dict[str, str | None] = {}
        with translated():
            pages = AsyncSandbox.list()
            while pages.has_next:
                found |= {info.sandbox_id: info.metadata.get(OWNER_LABEL) for info in await pages.next_items()}
        return found

    async def remove(self, sandbox_id: str) -> None:
        """See `LabelledProvider.remove`."""
        with translated():
            try:
                await AsyncSandbox.kill(sandbox_id)
            except NotFoundException:
                return


class E2bSandbox(ShellSandbox):
    async def run_shell(self, line: str, timeout_s: float | None) -> ExecResult:  # noqa: ARG002 - it is ended from here
        """See `ShellSandbox.run_shell`."""
        with translated():
            try:
                done = await self._handle.commands.run(line, user="root", timeout=NO_LIMIT)
            except CommandExitException as error:
                return ExecResult(error.exit_code, error.stdout, error.stderr)
        return ExecResult(done.exit_code, done.stdout, done.stderr)

    async def put(self, path: str, content: bytes) -> None:
        """See `LabelledSandbox.put`."""
        with translated():
            await self._handle.files.write(path, content, user="root")

    async def parts_of(self, path: str) -> AsyncGenerator[bytes, None]:
        """See `ShellSandbox.parts_of`."""
        with translated():
            async with await self._handle.files.read(path, format="stream", user="root") as parts:
                async for part in parts:
                    yield part

    async def snapshot(self) -> str:
        """See `RunningSandbox.snapshot`."""
        with translated():
            return f"{SNAPSHOT}{(await self._handle.create_snapshot()).snapshot_id}"
