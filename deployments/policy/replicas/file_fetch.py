"""Fetches the file of a version in ranges, several at a time, from the policy store and the replicas that have it.

Guarantees: each range is read once, unless its source failed; a source that failed is not asked again; memory holds at
most `READS_IN_FLIGHT` ranges.
"""

import asyncio
import logging
import os
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Protocol

from deployments.policy.replicas.commands import VersionPayload


class SourceFailed(Exception):
    """The source does not answer, or does not have the version."""


class WeightsSource(Protocol):
    """`StoreSource` and `ReplicaSource` (`deployments/policy/weight_sources.py`) implement it over Serve handles."""

    async def read(self, version: int, checksum: str, offset: int, count: int) -> bytes:
        """`count` bytes of the version's file from `offset` on; fewer at the end of the file.

        Args:
            checksum: of the version's tensors; a source that has other weights under this number fails. With that of a
                delta's own tensors the policy store gives the file of the delta.

        Raises:
            SourceFailed: the source cannot give them.
        """
        ...


def read_range(path: Path, offset: int, count: int) -> bytes:
    """Like `WeightsSource.read`, of a file on this node; raises `OSError`."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.pread(descriptor, count, offset)
    finally:
        os.close(descriptor)


READ_BYTES = 8 * 2**20
"""Holds the event loops of both ends for some milliseconds while it is packed and unpacked."""
READS_IN_FLIGHT = 4
READ_TIMEOUT_S = 60.0
"""A source that needs longer for one range has failed."""
logger = logging.getLogger("rollout_service.policy")


class WeightsNotFetched(Exception):
    """No source could give the bytes, or they are not those of the version."""


async def fetch_file(payload: VersionPayload, sources: Sequence[WeightsSource], descriptor: int) -> None:
    """Writes the file of the version to `descriptor`, a file that is open for writing.

    Raises:
        WeightsNotFetched: every source failed.
        OSError: the file cannot be written.
    """
    working = WorkingSources(sources)
    offsets = iter(range(0, payload.size_bytes, READ_BYTES))

    async def fetch_ranges() -> None:
        for offset in offsets:
            data = await working.read(payload, offset)
            await asyncio.to_thread(os.pwrite, descriptor, data, offset)

    try:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(READS_IN_FLIGHT):
                tasks.create_task(fetch_ranges())
    except ExceptionGroup as failures:
        # `except*` would do, but Python 3.11.2 and older raise a group out of it.
        raise failures.exceptions[0] from None


class WorkingSources:
    """The sources of one file that have not failed, which take turns."""

    def __init__(self, sources: Sequence[WeightsSource]) -> None:
        self._working = list(sources)
        self._turns = count()
        self._last_failure = "there is no source"

    async def read(self, payload: VersionPayload, offset: int) -> bytes:
        """The range that begins at `offset`; raises `WeightsNotFetched` once every source has failed."""
        size = min(READ_BYTES, payload.size_bytes - offset)
        while self._working:
            source = self._working[next(self._turns) % len(self._working)]
            try:
                async with asyncio.timeout(READ_TIMEOUT_S):
                    data = await source.read(payload.version, payload.checksum, offset, size)
            except TimeoutError:
                self._pass_over(source, payload, f"it gave nothing for {READ_TIMEOUT_S:g} s")
            except SourceFailed as failure:
                self._pass_over(source, payload, str(failure))
            else:
                if len(data) == size:
                    return data
                self._pass_over(source, payload, f"it gave {len(data)} bytes in place of {size}")
        raise WeightsNotFetched(f"The weights of version {payload.version} could not be fetched: {self._last_failure}")

    def _pass_over(self, source: WeightsSource, payload: VersionPayload, reason: str) -> None:
        self._last_failure = f"{source}: {reason}"
        if source in self._working:
            self._working.remove(source)
            message = "Weights are fetched without %s: %s"
            logger.warning(message, source, reason, extra={"version": payload.version})
