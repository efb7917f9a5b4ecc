"""Providers whose sandboxes outlive the process that created them: they are labelled, and a process beside it watches.

`Reaper` is that process. It reads from a pipe whose other end its owner holds, and destroys all sandboxes of the owner
when the pipe is closed: at the owner's end, however it came. Owners of other machines are left to their own reapers.
"""

import asyncio
import hashlib
import json
import logging
import os
import socket
import subprocess
import sys
from abc import abstractmethod
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any
from uuid import uuid4

from deployments.sandbox.interface import SandboxLost
from deployments.sandbox.providers.interface import (
    ExecTimedOut,
    OutOfMemory,
    ProviderUnusable,
    RunningSandbox,
    SandboxProvider,
    SandboxRefused,
    SandboxSpec,
    is_dead,
    open_provider,
    owner_of_process,
)

TRIES, REMOVE_TRIES, TRY_EVERY_S = 30, 5, 2.0
"""A sandbox whose creation was under way when its owner died appears a little later."""
FOUND_NONE = 3
"""Times in a row that none is found before a reaper ends."""
FOLDER = "/tmp/.rollout"
"""In sandboxes: files of commands."""
REAPER = f"import sys; from {__name__} import main; main(*sys.argv[1:])"
logger = logging.getLogger("rollout_service.sandbox")


class OwningProvider(SandboxProvider):
    """Base of them. `options` are the arguments of the subclass, with which its reaper opens it again."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options
        self._reaper: subprocess.Popen[bytes] | None = None
        # A process may open several: the end of one is not that of the others.
        self.owner = f"{this_machine()}.{owner_of_process(os.getpid())}.{uuid4().hex[:8]}"

    @abstractmethod
    async def owned(self) -> Mapping[str, str | None]:
        """The owners of all sandboxes that the provider knows, by the id of each; None for one that has no label.

        Raises `SandboxLost`.
        """

    @abstractmethod
    async def remove(self, sandbox_id: str) -> None:
        """Destroys a sandbox; returns also if it is gone. Raises `SandboxLost`."""

    def watched(self) -> None:
        """Starts the reaper, before the first sandbox exists."""
        if self._reaper is None:
            argv = [sys.executable, "-c", REAPER, self.name, json.dumps(dict(self._options)), self.owner]
            self._reaper = subprocess.Popen(
                ["setsid", "--fork", *argv],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )
            self._reaper.wait()

    async def reap(self) -> int:
        """See `SandboxProvider.reap`."""
        found = await self.owned()
        dead = [sandbox_id for sandbox_id, owner in found.items() if owner is not None and _has_died(owner)]
        await asyncio.gather(*map(self.remove, dead))
        return len(dead)

    async def remove_all_of(self, owner: str) -> int:
        of_owner = [sandbox_id for sandbox_id, other in (await self.owned()).items() if other == owner]
        await asyncio.gather(*map(self.remove, of_owner))
        return len(of_owner)

    async def removed_or_left(self, sandbox_id: str) -> None:
        """Destroys a sandbox of this owner. If the provider does not answer, it is left to the reaper."""
        for _ in range(REMOVE_TRIES):
            try:
                await self.remove(sandbox_id)
            except SandboxLost as error:
                problem = error
                await asyncio.sleep(TRY_EVERY_S)
                continue
            return
        logger.warning("The sandbox %s was not destroyed; its reaper will: %s", sandbox_id, problem)

    def close(self) -> None:
        """Leaves what is left to the reaper, which has it destroyed within seconds."""
        if self._reaper is not None:
            assert self._reaper.stdin is not None
            self._reaper.stdin.close()
            self._reaper = None


class OwnedSandbox(RunningSandbox):
    """Base of their sandboxes, whose commands the provider cannot end.

    Each command writes its process to a file before it begins, and reads its stdin from another one.
    """

    def __init__(self, provider: OwningProvider, sandbox_id: str, spec: SandboxSpec) -> None:
        self._provider = provider
        self._id = sandbox_id
        self._spec = spec

    @property
    def id(self) -> str:
        return self._id

    @abstractmethod
    async def put(self, path: str, content: bytes) -> None:
        """Writes a file and makes the folders that are missing. Raises `SandboxLost`."""

    @abstractmethod
    async def kill(self, path: str) -> None:
        """Ends the command that has written its process to the file. Raises `SandboxLost` or `OutOfMemory`."""

    async def with_stdin(self, stdin: bytes) -> tuple[str, str]:
        """The path to which a new command writes its process, and that of its stdin."""
        path = f"{FOLDER}/{uuid4().hex}"
        if not stdin:
            return path, "/dev/null"
        await self.put(f"{path}.stdin", stdin)
        return path, f"{path}.stdin"

    @asynccontextmanager
    async def ended_early(self, path: str, timeout_s: float | None) -> AsyncIterator[None]:
        """Ends the command if the block, which waits for it, is left before, or takes longer. Raises `ExecTimedOut`."""
        try:
            async with asyncio.timeout(timeout_s):
                yield
        except (SandboxLost, OutOfMemory):
            raise
        except BaseException as error:
            with suppress(SandboxLost, OutOfMemory):
                await asyncio.shield(asyncio.ensure_future(self.kill(path)))
            if isinstance(error, TimeoutError):
                raise ExecTimedOut(f"The command was ended after {timeout_s:g} s.") from error
            raise

    async def reach(self, base_url: str) -> str:
        """The address itself: `sessions.base_url` must be one that the provider's network reaches."""
        if not self._spec.network:
            raise SandboxRefused(
                f"network_mode is no-network, and a command in a sandbox of {self._provider.name} reaches {base_url} "
                "by its network: use the provider local, or call the service from outside of the sandbox."
            )
        return base_url

    async def close(self) -> None:
        """See `RunningSandbox.close`."""
        await self._provider.removed_or_left(self._id)


def _has_died(owner: str) -> bool:
    """Whether the owner was a process of this machine that has ended."""
    host, process, _ = owner.rsplit(".", 2)
    return host == this_machine() and is_dead(process)


def this_machine() -> str:
    """A name of this machine that fits into a label of any provider."""
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:12]


async def _reap_after(provider: OwningProvider, owner: str) -> None:
    """Destroys what the owner left, until nothing has come for a while."""
    found_none = 0
    for _ in range(TRIES):
        try:
            found_none = 0 if await provider.remove_all_of(owner) else found_none + 1
        except (SandboxLost, ProviderUnusable) as error:
            logger.warning("What a dead owner of sandboxes left cannot be found now: %s", error)
        if found_none == FOUND_NONE:
            return
        await asyncio.sleep(TRY_EVERY_S)


def main(name: str, options: str, owner: str) -> None:
    sys.stdin.buffer.read()
    provider = open_provider(name, json.loads(options))
    assert isinstance(provider, OwningProvider)
    asyncio.run(_reap_after(provider, owner))
