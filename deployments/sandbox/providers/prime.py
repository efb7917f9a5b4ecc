"""Sandboxes of Prime Intellect, by its Python SDK (`pip install prime-sandboxes`, 0.5): `prime`. The key is in
`PRIME_API_KEY`. It makes sandboxes from images and from checkpoints, and builds no folders.
"""

import asyncio
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any
from uuid import uuid4

from prime_sandboxes import APIError, AsyncSandboxClient, CommandTimeoutError, CreateSandboxRequest
from prime_sandboxes.exceptions import SandboxImagePullError, SandboxNotRunningError, SandboxOOMError

from deployments.sandbox.interface import SandboxLost
from deployments.sandbox.providers.interface import (
    OWNER_LABEL,
    ExecResult,
    OutOfMemory,
    RunningSandbox,
    SandboxRefused,
    SandboxSpec,
)
from deployments.sandbox.providers.shell import ShellProvider, ShellSandbox

CHECKPOINT = "checkpoint:"
LONGEST_COMMAND_S = 86_400
ENDED = ("TERMINATED", "ERROR", "TIMEOUT")


@contextmanager
def translated() -> Iterator[None]:
    """The SDK's exceptions as those of the interface."""
    try:
        yield
    except SandboxImagePullError as error:
        raise SandboxRefused(f"Prime refuses it: {error}") from error
    except SandboxOOMError as error:
        raise OutOfMemory(f"Prime: {error}") from error
    except (SandboxNotRunningError, CommandTimeoutError, APIError) as error:
        raise SandboxLost(f"Prime: {type(error).__name__}: {error}") from error


class PrimeProvider(ShellProvider):
    name = "prime"

    def __init__(self) -> None:
        super().__init__({})

    @cached_property
    def client(self) -> AsyncSandboxClient:
        return AsyncSandboxClient()

    async def create(self, spec: SandboxSpec) -> RunningSandbox:
        """See `SandboxProvider.create`."""
        self.refuse_folders(spec)
        if spec.image is None:
            raise SandboxRefused("The provider prime builds no folders: push the image, and name it in docker_image.")
        if not spec.network:
            raise SandboxRefused(
                "network_mode is no-network, and the provider prime makes no sandboxes without a network here: use "
                "another provider."
            )
        self.watched()
        fields: dict[str, Any] = {
            "name": f"rollout-{uuid4().hex}",
            "cpu_cores": spec.cpus or 1.0,
            "memory_gb": 1.0 if spec.memory_mb is None else spec.memory_mb / 1024,
            "timeout_minutes": math.ceil(spec.lifetime_s / 60),
            "environment_vars": dict(spec.environment),
            "labels": [f"{OWNER_LABEL}={self.owner}"],
        }
        if spec.image.startswith(CHECKPOINT):
            spec.refuse_limits("a sandbox of a checkpoint has the disk of the one that it was taken of", "storage_mb")
            fields["checkpoint_id"] = spec.image.removeprefix(CHECKPOINT)
        else:
            disk_gb = None if spec.storage_mb is None else spec.storage_mb / 1024
            fields |= {"docker_image": spec.image, "disk_size_gb": disk_gb}
        with translated():
            sandbox = await self.client.create(CreateSandboxRequest(**fields))
            try:
                await self.client.wait_for_creation(sandbox.id)
            except BaseException:
                await asyncio.shield(asyncio.ensure_future(self.removed_or_left(sandbox.id)))
                raise
        return PrimeSandbox(self, sandbox.id, spec)

    async def owned(self) -> dict[str, str | None]:
        """See `LabelledProvider.owned`."""
        owners, page, has_next = {}, 1, True
        with translated():
            while has_next:
                answer = await self.client.list(page=page, exclude_terminated=True)
                for sandbox in answer.sandboxes:
                    for label in sandbox.labels if sandbox.status not in ENDED else ():
                        if label.startswith(f"{OWNER_LABEL}="):
                            owners[sandbox.id] = label.partition("=")[2]
                page, has_next = page + 1, answer.has_next
        return owners

    async def remove(self, sandbox_id: str) -> None:
        """See `LabelledProvider.remove`."""
        try:
            await self.client.delete(sandbox_id)
        except APIError as error:
            if "HTTP 404" not in str(error):
                raise SandboxLost(f"Prime: {error}") from error


class PrimeSandbox(ShellSandbox):
    _provider: PrimeProvider

    async def run_shell(self, line: str, timeout_s: float | None) -> ExecResult:
        """See `ShellSandbox.run_shell`."""
        limit = LONGEST_COMMAND_S if timeout_s is None else math.ceil(timeout_s) + 1
        with translated():
            done = await self._provider.client.execute_command(self.id, line, timeout=limit, user="root")
        return ExecResult(done.exit_code, done.stdout, done.stderr)

    async def put(self, path: str, content: bytes) -> None:
        """See `LabelledSandbox.put`."""
        with translated():
            await self._provider.client.upload_bytes(self.id, path, content, Path(path).name)

    async def snapshot(self) -> str:
        """See `RunningSandbox.snapshot`."""
        with translated():
            made = await self._provider.client.checkpoint(self.id)
            await self._provider.client.wait_for_checkpoint(made.id)
        return f"{CHECKPOINT}{made.id}"
