"""`Checksum`: one sha-256 over all tensors of a model, computed alike by the client, the service and each engine."""

import hashlib
import json
import os
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager

from rollout_client.weights.safetensors_file import Data, read_header, tensor_blocks

HASHED_BEHIND = 1
"""How many tensors of a `ThreadedChecksum` may wait while another one is hashed."""


class Checksum:
    """Sha-256 over tensors, independent of the order in which they are added and of their layout in files.

    The digest is taken over one line per tensor, sorted by name: `name dtype shape digest`. The shape is JSON without
    spaces; the digest is the sha-256 of the tensor's little-endian data.
    """

    def __init__(self) -> None:
        self._lines: dict[str, str] = {}

    def add(self, name: str, dtype: str, shape: Iterable[int], blocks: Iterable[Data]) -> None:
        """Adds a tensor, whose data are `blocks` in order. A second tensor of the same name replaces the first."""
        digest = hashlib.sha256()
        for block in blocks:
            digest.update(block)
        shape_json = json.dumps(list(shape), separators=(",", ":"))
        self._lines[name] = f"{name} {dtype} {shape_json} {digest.hexdigest()}\n"

    def hexdigest(self) -> str:
        digest = hashlib.sha256()
        for name in sorted(self._lines):
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
        self._wait_for_all_but(HASHED_BEHIND + 1)

    def hexdigest(self) -> str:
        self._wait_for_all_but(0)
        return self._checksum.hexdigest()

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(cancel_futures=True)

    def _wait_for_all_but(self, count: int) -> None:
        while len(self._waiting) > count:
            self._waiting.popleft().result()


def file_checksum(path: str | os.PathLike[str]) -> str:
    """The checksum of the tensors of one file; raises what `read_header` raises."""
    header = read_header(path)
    checksum = Checksum()
    for entry in header.entries:
        checksum.add(entry.name, entry.dtype, entry.shape, tensor_blocks(path, header, entry))
    return checksum.hexdigest()
