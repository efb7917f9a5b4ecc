"""A real MCP server, by the official package: over standard input and output, or HTTP on a given port."""

import asyncio
import os
import sys

from mcp.server.mcpserver import MCPServer

server = MCPServer("numbers")
state = {"total": 0}


@server.tool()
def add(numbers: list[float]) -> float:
    """Adds numbers."""
    return sum(numbers)


@server.tool()
def count(step: int = 1) -> int:
    """Adds to a total, which this process keeps."""
    state["total"] += step
    return state["total"]


@server.tool()
def fail(reason: str) -> str:
    """Raises."""
    raise ValueError(reason)


@server.tool()
async def wait() -> str:
    """Waits for ever."""
    await asyncio.Event().wait()
    return "never"


@server.tool()
def die() -> str:
    """Ends the process."""
    os._exit(1)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run("stdio")
