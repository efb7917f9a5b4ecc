"""`Checksum`: one sha-256 over all tensors of a model, computed alike by the client, the service and each engine.

`weights_digest` covers each byte of a safetensors file. It is derived from the checksum without another pass over the
data, so a file is hashed once by its sender and once by its receiver.
"""

import hashlib
import json
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace

from rollout_client.weights.safetensors_file import (
    Data,
    Weights,
    header_bytes,
    read_header,
    read_header_bytes,
    tensor_blocks,
)

HASHED_BEHIND = 1
"""Number of tensors of a `ThreadedChecksum` that may wait while another one is hashed."""


class Checksum:
    """Sha-256 over tensors, independent of the order in which they are added and of their layout in files.

    The digest is taken over one line per tensor, sorted by name: `name dtype shape digest`. The shape is JSON without
    spaces; the digest is the sha-256 of the tensor's little-endian data.
    """

    def __init__(self) -> None:
        self._lines: dict[str, str] = {}

    def add(self, name: str, dtype: str, shape: Iterable[int], blocks: Iterable[Data]) -> None:
        """Adds a tensor, whose data are `blocks` in order. A second tensor of the same name replaces the first."""
        for _ in self.through(name, dtype, shape, blocks):
            pass

    def through(self, name: str, dtype: str, shape: Iterable[int], blocks: Iterable[Data]) -> Iterator[Data]:
        """Yields `blocks`; the tensor is added once all of them were taken."""
        digest = hashlib.sha256()
        for block in blocks:
            digest.update(block)
            yield block
        shape_json = json.dumps(list(shape), separators=(",", ":"))
        self._lines[name] = f"{name} {dtype} {shape_json} {digest.hexdigest()}\n"

    def hexdigest(self, names: Iterable[str] | None = None) -> str:
        """The checksum of all tensors that were added, or of `names`."""
        digest = hashlib.sha256()
        for name in sorted(self._lines if names is None else names):
            digest.update(self._lines[name].encode())
        return digest.hexdigest()


class ThreadedChecksum(AbstractContextManager["ThreadedChecksum"]):
    """A `Checksum` that is computed in a thread, one tensor while the caller makes the next.

    Use it as a context manager. Memory holds the tensors that wait: at most `HASHED_BEHIND` and the one that is hashed.
    """

    def __init__(self) -> None:
        self._checksum = Checksum()
        self._thread = ThreadPoolExecutor(1)
        self._waiting: deque[Future[None]] = deque()

    def add(self, name: str, dtype: str, shape: Iterable[int], data: Data) -> None:
        """Adds a tensor. Its data must not change before `hexdigest` returns, or two more tensors are added."""
        self._waiting.append(self._thread.submit(self._checksum.add, name, dtype, shape, [data]))
        if len(self._waiting) > HASHED_BEHIND + 1:
            self._waiting.popleft().result()

    def hexdigest(self) -> str:
        for adding in self._waiting:
            adding.result()
        return self._checksum.hexdigest()

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(cancel_futures=True)


def file_checksum(path: str | os.PathLike[str]) -> str:
    """The checksum of the tensors of one file; raises what `read_header` raises."""
    header = read_header(path)
    checksum = Checksum()
    for entry in header.entries:
        checksum.add(entry.name, entry.dtype, entry.shape, tensor_blocks(path, header, entry))
    return checksum.hexdigest()


def weights_digest(header: bytes, checksum: str) -> str:
    """The sha-256 (hex) by which the sender of a safetensors file names its content.

    It is taken over the bytes that precede the data, and the `Checksum` (hex) of the tensors.
    """
    return hashlib.sha256(header + checksum.encode()).hexdigest()


def file_digest(path: str | os.PathLike[str], checksum: str | None = None) -> str:
    """The `weights_digest` of a file; raises what `read_header` raises.

    Args:
        checksum: the checksum of its tensors, if known: then only the header is read.
    """
    header = read_header_bytes(path, read_header(path))
    return weights_digest(header, file_checksum(path) if checksum is None else checksum)


class DigestedWeights:
    """The bytes of `weights`, hashed while they are sent: after the last block, `digest` is their `weights_digest`."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self.digest: str | None = None

    def blocks(self) -> Iterator[Data]:
        weights, checksum = self._weights, Checksum()
        hashed = replace(
            weights, read=lambda entry: checksum.through(entry.name, entry.dtype, entry.shape, weights.read(entry))
        )
        yield from (hashed if weights.checksum is None else weights).blocks()
        start = header_bytes(weights.header.entries, weights.header.metadata)
        self.digest = weights_digest(start, weights.checksum or checksum.hexdigest())
