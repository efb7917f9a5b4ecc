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
from collections.abc import Mapping
from typing import Any
from uuid import uuid4

from deployments.sandbox.interface import SandboxLost
from deployments.sandbox.providers.interface import ProviderUnusable, SandboxProvider, is_dead, owner_of_process
from deployments.sandbox.providers.opening import opened

TRIES, REMOVE_TRIES, TRY_EVERY_S = 30, 5, 2.0
"""A sandbox whose creation was under way when its owner died appears a little later."""
FOUND_NONE = 3
"""Times in a row that none is found before a reaper ends."""
REAPER = f"import sys; from {__name__} import main; main(*sys.argv[1:])"
logger = logging.getLogger("rollout_service.sandbox")


class LabelledProvider(SandboxProvider):
    """Base of them. `options` are the arguments of the subclass, with which its reaper opens it again."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options
        self._reaper: subprocess.Popen[bytes] | None = None
        # A process may open several: the end of one is not that of the others.
        self.owner = f"{this_machine()}.{owner_of_process(os.getpid())}.{uuid4().hex[:8]}"

    @abstractmethod
    async def owned(self) -> dict[str, str]:
        """The owners of all sandboxes of rollouts that the provider knows, by the id of each. Raises `SandboxLost`."""

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
        dead = [sandbox_id for sandbox_id, owner in found.items() if has_died(owner)]
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


def has_died(owner: str) -> bool:
    """Whether the owner was a process of this machine that has ended."""
    host, process, _ = owner.rsplit(".", 2)
    return host == this_machine() and is_dead(process)


def this_machine() -> str:
    """A name of this machine that fits into a label of any provider."""
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:12]


async def reap_after(provider: LabelledProvider, owner: str) -> None:
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
    provider = opened(name, json.loads(options))
    assert isinstance(provider, LabelledProvider)
    asyncio.run(reap_after(provider, owner))
