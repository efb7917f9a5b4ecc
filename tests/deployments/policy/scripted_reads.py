"""A policy store from which a node reads one file, without Serve: it gives the bytes, or fails as told."""

import asyncio
from dataclasses import dataclass, field

from deployments.failures import PolicyStoreLost
from deployments.policy.failures import VersionUnknown


@dataclass
class ScriptedReads:
    """Stands in for `PolicyStore.read_weights`."""

    content: bytes
    fails_after: int | None = None
    """How many reads succeed; all of them if `None`."""
    lost: range = range(0)
    """The reads that find the store restarting, by their number from 0."""
    damages: int = 0
    """How many of the first reads give other bytes."""
    hangs: bool = False
    version: int = 7
    checksum: str | None = None
    """Other versions are not held; `None`: any checksum is right."""
    offsets: list[int] = field(default_factory=list)
    """The offsets of the reads, in order."""
    reading: int = 0
    most_reading: int = 0
    """The most reads that were under way at a time."""

    async def read(self, version: int, checksum: str, offset: int, count: int) -> bytes:
        number = len(self.offsets)
        self.offsets.append(offset)
        self.reading += 1
        self.most_reading = max(self.most_reading, self.reading)
        try:
            await asyncio.sleep(0)
            if self.hangs:
                await asyncio.Event().wait()
        finally:
            self.reading -= 1
        if version != self.version or self.checksum not in (None, checksum):
            raise VersionUnknown.not_stored(version)
        if self.fails_after is not None and len(self.offsets) > self.fails_after:
            raise OSError("it died")
        if number in self.lost:
            raise PolicyStoreLost("The policy store died during the call.")
        data = self.content[offset : offset + count]
        return bytes(len(data)) if number < self.damages else data
