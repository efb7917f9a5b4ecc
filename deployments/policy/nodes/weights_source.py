"""Where a node fetches the bytes of a version: from the policy store, or from a replica that has them."""

import os
from pathlib import Path
from typing import Protocol


class SourceFailed(Exception):
    """The source does not answer, or does not have the version."""


class WeightsSource(Protocol):
    """`StoreSource` and `ReplicaSource` (`serve_sources.py`) implement it over Serve handles."""

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
