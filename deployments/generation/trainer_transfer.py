"""The tensors of a transfer, written to a safetensors file while the engine loads them, so that others can have them.

Guarantees: a transfer never fails because of it, what goes wrong is told by `state`; the file holds what the engine has
loaded, in the dtypes of the checkpoint; memory holds at most `MOST_WAITING` tensors beside the engine's.
"""

import os
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from rollout_client.weights.checksum import Checksum
from rollout_client.weights.safetensors_file import Data, TensorEntry, header_bytes, header_of
from rollout_client.weights.torch_tensor import DTYPES, data_of

MOST_WAITING = 4
Layout = Mapping[str, tuple[str, Sequence[int]]]
"""Of the checkpoint: dtype and shape of each tensor by its name."""
Written = tuple[str, int]
"""The `Checksum` of the file, and its size in bytes."""


class OtherTensors(Exception):
    """The trainer sent other tensors than the checkpoint has."""


class ArrivingWeights:
    """
    Args:
        path: of the file; one that is there is replaced.
        engine_dtype: in which the engine computes.
    """

    def __init__(self, path: Path, layout: Layout, engine_dtype: torch.dtype) -> None:
        self._path = path
        self._engine_dtype = engine_dtype
        self._checksum = Checksum()
        self._failure: Exception | None = None
        self._thread = ThreadPoolExecutor(1)
        self._writing: deque[Future[None]] = deque()
        self._written: Future[Written] | None = None
        self._descriptor = -1
        try:
            header = header_of((name, dtype, shape) for name, (dtype, shape) in layout.items())
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            write_at(self._descriptor, 0, header_bytes(header.entries))
        except (OSError, ValueError) as failure:
            self._failure = failure
        else:
            self._header = header
            self._entries = header.by_name
            self._missing = set(self._entries)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Takes a copy. A second tensor of the same name replaces the first."""
        if self._failure is not None:
            return
        try:
            entry = self._entry_of(name, tensor)
            self._writing.append(self._thread.submit(self._write, entry, data_of(self._cast(entry, tensor))))
            while len(self._writing) > MOST_WAITING:
                self._writing.popleft().result()
        except Exception as failure:  # noqa: BLE001 - told by `state`
            self._failure = failure

    def end(self) -> None:
        """No further tensor comes. May be called more than once."""
        if self._written is None:
            self._written = self._thread.submit(self._finish)
            self._thread.shutdown(wait=False)

    def state(self) -> tuple[Written | None, str | None]:
        """What was written, once all is, and the error, if any. Call it after `end`."""
        if self._written is None or not self._written.done():
            return None, None
        failure = self._written.exception()
        return (self._written.result(), None) if failure is None else (None, f"{type(failure).__name__}: {failure}")

    def discard(self) -> None:
        """Removes the file."""
        self._failure = self._failure or OtherTensors("the transfer broke off")
        self.end()
        self._path.unlink(missing_ok=True)

    def _entry_of(self, name: str, tensor: torch.Tensor) -> TensorEntry:
        entry = self._entries.get(name)
        if entry is None:
            raise OtherTensors(f"the checkpoint has no tensor {name}")
        if tuple(tensor.shape) != entry.shape:
            raise OtherTensors(f"{name} has the shape {list(tensor.shape)}; the checkpoint's is {list(entry.shape)}")
        return entry

    def _cast(self, entry: TensorEntry, tensor: torch.Tensor) -> torch.Tensor:
        """The engine casts what it loads to its own dtype. Another one before that could round a value twice."""
        dtype = DTYPES[entry.dtype]
        cast = tensor.detach().to("cpu", dtype, copy=True)
        is_exact = dtype in (tensor.dtype, self._engine_dtype)
        if not is_exact and not torch.equal(cast.to(tensor.dtype), tensor.detach().cpu()):
            raise OtherTensors(f"{entry.name} is {tensor.dtype}, which the checkpoint's {entry.dtype} cannot hold")
        return cast

    def _write(self, entry: TensorEntry, data: Data) -> None:
        write_at(self._descriptor, self._header.data_begin + entry.begin, data)
        self._checksum.add(entry.name, entry.dtype, entry.shape, [data])
        self._missing.discard(entry.name)

    def _finish(self) -> Written:
        """Runs after all writes, in their thread."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        if self._failure is not None:
            raise self._failure
        for writing in self._writing:
            writing.result()
        if self._missing:
            message = f"{len(self._missing)} of {len(self._entries)} tensors were not sent, as {min(self._missing)}"
            raise OtherTensors(message)
        return self._checksum.hexdigest(), self._header.file_bytes


def write_at(descriptor: int, offset: int, data: Data) -> None:
    rest = memoryview(data)
    while rest:
        written = os.pwrite(descriptor, rest, offset)
        rest, offset = rest[written:], offset + written
