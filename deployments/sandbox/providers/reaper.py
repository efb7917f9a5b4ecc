"""Providers whose sandboxes outlive the process that created them: a process beside it, the reaper, destroys them.

The reaper reads from a pipe whose other end its owner holds. When the pipe is closed, which is at the end of the owner,
however that came, it destroys all sandboxes with the owner's label. If both die at once, nothing destroys them.
"""

import asyncio
import json
import os
import subprocess
import sys
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any
from uuid import uuid4

from deployments.sandbox.interface import SandboxLost
from deployments.sandbox.providers.interface import open_provider
from deployments.sandbox.providers.shell import RemoteProvider

TRIES, TRY_EVERY_S = 30, 2.0
"""A sandbox whose creation was under way when its owner died appears a little later."""
_REAPER = f"import sys; from {__name__} import main; main(*sys.argv[1:])"


class ReapedProvider(RemoteProvider):
    """Base of these providers. `options` are the arguments of the subclass, with which its reaper opens it again."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options
        self._reaper: subprocess.Popen[bytes] | None = None
        # A process may open several: the end of one is not that of the others.
        self.owner = f"{os.getpid()}-{uuid4().hex}"

    @abstractmethod
    async def ids_of(self, owner: str) -> Sequence[str]:
        """The ids of the sandboxes with the label of this owner. Raises `SandboxLost`."""

    def start_reaper(self) -> None:
        """Starts the reaper, before the first sandbox exists."""
        if self._reaper is None:
            argv = [sys.executable, "-c", _REAPER, self.name, json.dumps(dict(self._options)), self.owner]
            self._reaper = subprocess.Popen(
                ["setsid", "--fork", *argv],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )
            self._reaper.wait()

    def close(self) -> None:
        """Leaves the remaining sandboxes to the reaper, which destroys them within seconds."""
        if self._reaper is not None:
            assert self._reaper.stdin is not None
            self._reaper.stdin.close()
            self._reaper = None


async def _reap(provider: ReapedProvider, owner: str) -> None:
    for _ in range(TRIES):
        # Nobody reads what the reaper says. It tries again.
        with suppress(SandboxLost):
            await asyncio.gather(*map(provider.remove, await provider.ids_of(owner)))
        await asyncio.sleep(TRY_EVERY_S)


def main(name: str, options: str, owner: str) -> None:
    """Reaps at the end of the owner. The arguments are the provider's name, its options as JSON, and the label."""
    sys.stdin.buffer.read()
    provider = open_provider(name, json.loads(options))
    assert isinstance(provider, ReapedProvider)
    asyncio.run(_reap(provider, owner))
