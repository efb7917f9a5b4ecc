"""Runs a command in a sandbox without network, and carries its connections to the service through a Unix socket.

    relay.py PORT SOCKET COMMAND...

It listens on PORT of the sandbox's own loopback, the replica (`deployments/agents/command_sandbox.py`) on SOCKET. It
needs the standard library alone: the interpreter is any Python.
"""

import asyncio
import sys
from urllib.parse import urlsplit


async def main(port: int, socket: str, argv: list[str]) -> int:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            service = await asyncio.open_unix_connection(socket)
        except OSError:
            writer.close()
            return
        await asyncio.gather(forward_bytes(reader, service[1]), forward_bytes(service[0], writer))

    async with await asyncio.start_server(connected, "127.0.0.1", port):
        process = await asyncio.create_subprocess_exec(*argv)
        code = await process.wait()
    return code if code >= 0 else 128 - code


async def forward_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, base_url: str) -> None:
    """Carries a connection that came out of a sandbox to the service at `base_url`, until both sides have ended."""
    address = urlsplit(base_url)
    try:
        service = await asyncio.open_connection(
            address.hostname, address.port, ssl=True if address.scheme == "https" else None
        )
    except OSError:
        writer.close()
        return
    await asyncio.gather(forward_bytes(reader, service[1]), forward_bytes(service[0], writer))


async def forward_bytes(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    """Carries bytes until one side has ended."""
    try:
        while part := await source.read(65536):
            target.write(part)
            await target.drain()
    except OSError:
        pass
    finally:
        target.close()


if __name__ == "__main__":
    sys.exit(asyncio.run(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])))
