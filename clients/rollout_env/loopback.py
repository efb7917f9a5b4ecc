"""Servers on this machine: whether a URL names one, and a server on a free port beside the one of the process.

It needs uvicorn, which the extra `serve` installs.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import uvicorn

if TYPE_CHECKING:
    from starlette.applications import Starlette

NAMES = ("localhost", "127.0.0.1", "::1")


def is_loopback(url: str) -> bool:
    """Whether the server is on this machine, where the proxy that the process's environment names cannot reach it."""
    return urlsplit(url).hostname in NAMES


class LoopbackServer(uvicorn.Server):
    """Serves an app on a free port of loopback. Signals are left to the server that the process has already."""

    def __init__(self, app: "Starlette") -> None:
        super().__init__(
            uvicorn.Config(
                app, host="127.0.0.1", port=0, log_level="warning", lifespan="off", timeout_graceful_shutdown=1
            )
        )

    async def start(self) -> str:
        """Returns the URL at which it answers."""
        self._serving = asyncio.get_running_loop().create_task(self.serve())
        while not self.started:
            await asyncio.sleep(0.01)
        return f"http://127.0.0.1:{self.servers[0].sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        self.should_exit = True
        await self._serving

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
