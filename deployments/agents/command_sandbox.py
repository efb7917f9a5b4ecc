"""The sandbox of a command: bubblewrap, with one way out, which leads to the service.

The command sees a port of its own loopback. `relay.py` carries what comes there through a Unix socket, and this
replica carries it on to the address of the session.
"""

import asyncio
import shutil
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from deployments.agents.settings import CommandSettings
from deployments.sandbox.interface import Limits
from deployments.sandbox.isolation import NAMESPACES, folder_mounts, private_mounts, system_mounts
from deployments.sandbox.launch import WORK, HeldFds, default_interpreters
from deployments.sandbox.programs import relay
from deployments.sandbox.programs.relay import forward_connection
from deployments.sandbox.system_calls import FilterOptions, system_call_filter

PORT = 8000
NOBODY = "65534"
SOCKET = "/tmp/service.sock"
RELAY = "/tmp/relay.py"
TRIED_WITHIN_S = 30.0
KEEPS_ENVIRONMENT = [part for part in NAMESPACES if part != "--clearenv"]
"""The command's environment is already made for it, and a command line would show its key to other users."""


class SandboxUnusable(Exception):
    """A command cannot be run in a sandbox on this machine. The message is a sentence."""


@dataclass(frozen=True, slots=True)
class CommandLaunch:
    """The command line of one run, and how the command reaches its session and folder."""

    argv: Sequence[str]
    base_url: str
    """Address of the session, as the command reaches it."""
    folder: str
    """Folder of the run, as the command sees it."""
    fds: tuple[int, ...]


class CommandSandbox:
    def __init__(self, settings: CommandSettings) -> None:
        """Checks that bubblewrap works. Raises `SandboxUnusable`."""
        if (bubblewrap := shutil.which("bwrap")) is None:
            raise SandboxUnusable("command.sandbox needs bubblewrap: apt-get install bubblewrap.")
        interpreter = default_interpreters(())[0]
        self._filter = system_call_filter(FilterOptions())
        self._walls = [
            *(bubblewrap, *KEEPS_ENVIRONMENT, "--unshare-user", "--uid", NOBODY, "--gid", NOBODY, "--cap-drop", "ALL"),
            *private_mounts(Limits()),
            *system_mounts(),
            *folder_mounts(interpreter.folders),
            *folder_mounts([folder for folder in settings.folders if not is_below_usr(folder)]),
            *("--ro-bind", relay.__file__, RELAY),
        ]
        self._relay = [interpreter.executable, "-s", "-S", "-B", RELAY, str(PORT), SOCKET]
        self._try()

    @asynccontextmanager
    async def around(self, argv: Sequence[str], base_url: str, folder: Path) -> AsyncIterator[CommandLaunch]:
        """The launch of the command inside the sandbox. Its connection to the service is open within the block."""
        socket = folder.with_name(f"{folder.name}.sock")

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await forward_connection(reader, writer, base_url)

        server = await asyncio.start_unix_server(connected, socket)
        try:
            with HeldFds() as held:
                binds = ["--bind", str(folder), WORK, "--bind", str(socket), SOCKET]
                filtered = [] if self._filter is None else ["--seccomp", str(held.add(self._filter))]
                start = [*self._walls, *binds, "--remount-ro", "/", "--chdir", WORK, *filtered]
                inside = f"http://127.0.0.1:{PORT}{urlsplit(base_url).path}"
                yield CommandLaunch([*start, *self._relay, *argv], inside, WORK, tuple(held.fds))
        finally:
            server.close()
            socket.unlink(missing_ok=True)

    def _try(self) -> None:
        tried = subprocess.run(
            [*self._walls, "/usr/bin/env", "true"], check=False, capture_output=True, timeout=TRIED_WITHIN_S, text=True
        )
        if tried.returncode != 0:
            raise SandboxUnusable(f"command.sandbox: bubblewrap does not work on this machine: {tried.stderr.strip()}")


def is_below_usr(folder: str) -> bool:
    return Path(folder).is_relative_to("/usr")
