"""The sandboxes of one owner: not more than a number at once, some of them ready before they are asked for.

Guarantees: of what was taken or kept warm, nothing is left after `close`; a warm sandbox that has ended is never given
out; while the pool lives, what dead owners left is destroyed within `REAP_EVERY_S` and the time that it takes.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Coroutine
from typing import Any

from deployments.sandbox.interface import SandboxLost
from deployments.sandbox.providers.interface import (
    OutOfMemory,
    ProviderUnusable,
    RunningSandbox,
    SandboxProvider,
    SandboxRefused,
    SandboxSpec,
)

REAP_EVERY_S = 4.0
logger = logging.getLogger("rollout_service.sandbox")


class SandboxPool:
    """Takes sandboxes from a provider.

    Args:
        most: sandboxes at once, warm ones included; who asks for more waits.
        warm: sandboxes that are kept ready of the kind that was asked for last.
        warm_s: seconds after which a warm one is destroyed that nobody has taken.
    """

    def __init__(self, provider: SandboxProvider, most: int, warm: int = 0, warm_s: float = 60.0) -> None:
        self.provider = provider
        self._places = asyncio.Semaphore(most)
        self._warm = min(warm, most - 1)
        self._warm_s = warm_s
        self._kind = ""
        self._ready: deque[RunningSandbox] = deque()
        self._making = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._reaps = False

    async def take(self, spec: SandboxSpec) -> RunningSandbox:
        """A sandbox that nobody else has. `give_back` destroys it. Raises what `SandboxProvider.open` raises."""
        if not self._reaps:
            self._reaps = True
            self._start(self._reap())
        if (kind := repr(spec)) != self._kind:
            self._kind = kind
            self._drop_warm()
        sandbox = await self._warm_one()
        if sandbox is None:
            await self._places.acquire()
            try:
                sandbox = await self.provider.open(spec)
            except BaseException:
                self._places.release()
                raise
        for _ in range(self._warm - len(self._ready) - self._making):
            self._making += 1
            self._start(self._make_warm(kind, spec))
        return sandbox

    async def give_back(self, sandbox: RunningSandbox) -> None:
        """Destroys a sandbox, to the end also while the caller is cancelled."""
        await asyncio.shield(asyncio.ensure_future(self._destroyed(sandbox)))

    def close(self) -> None:
        """Destroys all sandboxes of this owner."""
        for task in list(self._tasks):
            task.cancel()
        self.provider.close()

    async def _warm_one(self) -> RunningSandbox | None:
        while self._ready:
            sandbox = self._ready.popleft()
            try:
                await sandbox.exec(["true"])
            except (SandboxLost, OutOfMemory):
                await self.give_back(sandbox)
                continue
            except BaseException:
                await self.give_back(sandbox)
                raise
            return sandbox
        return None

    async def _make_warm(self, kind: str, spec: SandboxSpec) -> None:
        try:
            if self._places.locked():
                return  # Whoever waits for a place goes first.
            await self._places.acquire()
            try:
                sandbox = await self.provider.open(spec)
            except (SandboxLost, SandboxRefused) as error:
                self._places.release()
                logger.warning("No sandbox was made ready: %s", error)
                return
            except BaseException:
                self._places.release()
                raise
        finally:
            self._making -= 1
        if kind != self._kind:
            await self.give_back(sandbox)
            return
        self._ready.append(sandbox)
        await asyncio.sleep(self._warm_s)
        if sandbox in self._ready:
            self._ready.remove(sandbox)
            await self.give_back(sandbox)

    def _drop_warm(self) -> None:
        while self._ready:
            self._start(self.give_back(self._ready.popleft()))

    async def _destroyed(self, sandbox: RunningSandbox) -> None:
        try:
            await sandbox.close()
        finally:
            self._places.release()

    async def _reap(self) -> None:
        while True:
            try:
                if reaped := await self.provider.reap():
                    logger.info("Destroyed what dead owners of sandboxes left: %d.", reaped)
            except (SandboxLost, ProviderUnusable) as error:
                logger.warning("What dead owners of sandboxes left cannot be found now: %s", error)
            await asyncio.sleep(REAP_EVERY_S)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
