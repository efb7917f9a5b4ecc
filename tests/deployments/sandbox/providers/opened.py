"""A sandbox for the length of a block."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from deployments.sandbox.providers.interface import RunningSandbox, SandboxProvider, SandboxSpec


@asynccontextmanager
async def opened(provider: SandboxProvider, spec: SandboxSpec) -> AsyncIterator[RunningSandbox]:
    sandbox = await provider.open(spec)
    try:
        yield sandbox
    finally:
        await sandbox.close()
