"""Sandboxes of Modal, by its Python SDK (`pip install modal`, 1.6): `modal`. The key is in `MODAL_TOKEN_ID` and
`MODAL_TOKEN_SECRET`.
"""

import asyncio
import math
from collections.abc import AsyncIterable, Iterator
from contextlib import contextmanager
from typing import Any

import modal
from modal.exception import Error, ImageBuildError, InvalidError, NotFoundError

from deployments.sandbox.interface import SandboxLost
from deployments.sandbox.providers.interface import (
    LARGEST_OUTPUT_BYTES,
    OWNER_LABEL,
    ExecResult,
    RunningSandbox,
    SandboxRefused,
    SandboxSpec,
)
from deployments.sandbox.providers.shell import ShellProvider, ShellSandbox

SNAPSHOT = "im-"
"""The beginning of the ids of Modal's images."""


@contextmanager
def translated() -> Iterator[None]:
    """The SDK's exceptions as those of the interface."""
    try:
        yield
    except (ImageBuildError, InvalidError) as error:
        raise SandboxRefused(f"Modal refuses it: {error}") from error
    except Error as error:
        raise SandboxLost(f"Modal: {type(error).__name__}: {error}") from error


class ModalProvider(ShellProvider):
    name = "modal"

    def __init__(self, app: str = "rollout-sandboxes") -> None:
        """Opens no connection yet. `app` names the app of the sandboxes, which is made if it is missing."""
        super().__init__({"app": app})
        self._app_name = app

    async def _app(self) -> Any:
        return await modal.App.lookup.aio(self._app_name, create_if_missing=True)

    async def create(self, spec: SandboxSpec) -> RunningSandbox:
        """See `SandboxProvider.create`."""
        self.refuse_folders(spec)
        spec.refuse_limits("Modal gives no sandbox a disk of its own size", "storage_mb")
        self.watched()
        with translated():
            if spec.folder is not None:
                image = modal.Image.from_dockerfile(spec.folder / "Dockerfile", context_dir=spec.folder)
            elif str(spec.image).startswith(SNAPSHOT):
                image = modal.Image.from_id(str(spec.image))
            else:
                image = modal.Image.from_registry(str(spec.image))
            sandbox = await modal.Sandbox.create.aio(
                app=await self._app(),
                image=image,
                tags={OWNER_LABEL: self.owner},
                env=dict(spec.environment),
                timeout=math.ceil(spec.lifetime_s),
                # A number alone is what Modal reserves; the second one of a pair is the limit.
                cpu=None if spec.cpus is None else (spec.cpus, spec.cpus),
                memory=None if spec.memory_mb is None else (spec.memory_mb, spec.memory_mb),
                block_network=not spec.network,
            )
        return ModalSandbox(self, sandbox.object_id, spec, sandbox)

    async def owned(self) -> dict[str, str | None]:
        """See `LabelledProvider.owned`."""
        owners = {}
        with translated():
            async for sandbox in modal.Sandbox.list.aio(app_id=(await self._app()).app_id):
                owners[sandbox.object_id] = (await sandbox.get_tags.aio()).get(OWNER_LABEL)
        return owners

    async def remove(self, sandbox_id: str) -> None:
        """See `LabelledProvider.remove`."""
        with translated():
            try:
                await (await modal.Sandbox.from_id.aio(sandbox_id)).terminate.aio(wait=True)
            except NotFoundError:
                return


class ModalSandbox(ShellSandbox):
    async def run_shell(self, line: str, timeout_s: float | None) -> ExecResult:
        """See `ShellSandbox.run_shell`."""
        limit = None if timeout_s is None else math.ceil(timeout_s) + 1
        with translated():
            process = await self._handle.exec.aio("sh", "-c", line, timeout=limit)
            stdout, stderr, code = await asyncio.gather(
                last_of(process.stdout), last_of(process.stderr), process.wait.aio()
            )
        return ExecResult(code, stdout, stderr)

    async def put(self, path: str, content: bytes) -> None:
        """See `LabelledSandbox.put`."""
        with translated():
            await self._handle.filesystem.write_bytes.aio(content, path)

    async def snapshot(self) -> str:
        """See `RunningSandbox.snapshot`."""
        with translated():
            image = await self._handle.snapshot_filesystem.aio()
            name: str = image.object_id
            return name


async def last_of(stream: AsyncIterable[str]) -> str:
    """The last `LARGEST_OUTPUT_BYTES` of a stream."""
    kept = bytearray()
    async for part in stream:
        kept += part.encode(errors="replace")
        del kept[:-LARGEST_OUTPUT_BYTES]
    return kept.decode(errors="replace")
