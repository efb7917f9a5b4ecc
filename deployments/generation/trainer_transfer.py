"""A worker's end of a transfer from a trainer: the rendezvous, a watch of the trainer, and a file of what arrives.

The worker meets the trainer in a thread, so that the engine goes on generating. It takes the connection only if the
rendezvous was not given up before it was complete, and takes part in one rendezvous at a time, because two would take
each other's rank at the trainer. vLLM's own cannot be interrupted: one that was given up ends when vLLM's time limit
does (minutes) or when the trainer's process ends, and the next one is refused until then.

`TrainerWatch` notices a trainer that falls silent, where vLLM's backends would wait on and on.

`TransferFile` writes the tensors to a safetensors file while the engine loads them, so that others can have them.
Guarantees: a transfer never fails because of it, `written` tells what goes wrong; the file holds what the engine has
loaded, in the dtypes of the checkpoint. What arrives waits in the host's memory, in at most `WAITING_SHARE` of what is
free when the transfer begins: the trainer, and generations with it, wait for the disk only where that is too little.
"""

import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any, Self

import psutil
import torch

from rollout_client.weights.checksum import Checksum
from rollout_client.weights.model_tensors import DTYPES, data_of
from rollout_client.weights.safetensors_file import LENGTH_BYTES, Data, TensorEntry, parse_header

_PROBE_TIMEOUT_S = 1.0
_PROBE_PAUSE_S = 0.1


class TrainerRendezvous:
    """Begins at once.

    Args:
        engine: of vLLM, not connected yet; its `init_transfer_engine` is called.
        init_info: as `engine.parse_init_info` returns it.
    """

    def __init__(self, engine: Any, init_info: Any) -> None:
        self.engine = engine
        """Connected to the trainer once `has_ended` without an `error`."""
        self.has_begun = self.has_ended = False
        """Whether vLLM connects, which cannot be interrupted, and whether that or the wait before it has ended."""
        self.error: str | None = None
        self.waits_for = "the trainer does not answer"
        """The step that is waited for, for messages."""
        self._init_info = init_info
        self._given_up = Event()
        self._deciding = Lock()
        # A daemon: the worker's process has to end even if the trainer never answers.
        self._thread = Thread(target=self._run, name="trainer-rendezvous", daemon=True)
        self._thread.start()

    def give_up(self) -> None:
        """Nobody takes the connection any more: it is closed, at once or when it is complete."""
        with self._deciding:
            self._given_up.set()
            if self.has_ended:
                self.engine.shutdown()

    def _run(self) -> None:
        try:
            if self._finds_listener():
                self.has_begun = True
                _use_device(getattr(self.engine, "device", None))
                self.engine.init_transfer_engine(self._init_info)
        except Exception as failure:  # noqa: BLE001 - read by the worker
            self.error = f"{type(failure).__name__}: {failure}"
        with self._deciding:
            self.has_ended = True
            if self._given_up.is_set():
                self.engine.shutdown()

    def _finds_listener(self) -> bool:
        """vLLM begins only when it will find somebody: what it has begun it does not end for minutes.

        Returns false if the rendezvous is given up before.
        """
        host = getattr(self._init_info, "master_address", None)
        port = getattr(self._init_info, "master_port", None)
        waited_for = self.waits_for
        while host is not None and port is not None and not listens(host, port):
            self.waits_for = f"nobody listens at {host}:{port}"
            if self._given_up.wait(_PROBE_PAUSE_S):
                return False
        self.waits_for = waited_for
        return not self._given_up.is_set()


def listens(host: str, port: int) -> bool:
    with suppress(OSError), socket.create_connection((host, port), _PROBE_TIMEOUT_S):
        return True
    return False


def _use_device(device: torch.device | None) -> None:
    """vLLM's backends take the current device of their thread."""
    if device is not None and device.type != "cpu":
        torch.accelerator.set_device_index(device)


class TrainerWatch:
    """For the length of a block: calls `hang_up` once, in a thread, if nothing was noted for `limit_s` seconds."""

    def __init__(self, limit_s: float, hang_up: Callable[[], None]) -> None:
        self.has_hung_up = False
        self._limit_s = limit_s
        self._hang_up = hang_up
        self._last = time.monotonic()
        self._ends = Event()
        self._thread = Thread(target=self._watch, name="silence-watch", daemon=True)

    def __enter__(self) -> Self:
        self.note()
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._ends.set()
        self._thread.join()

    def note(self) -> None:
        self._last = time.monotonic()

    @contextmanager
    def noting_weights_of(self, model: Any, arrived: Callable[[Any], None]) -> Iterator[None]:
        """Notes each tensor that `model.load_weights` takes, which `arrived` is called with before, and its end."""
        load_weights = model.load_weights

        def noted(weights: Iterable[Any]) -> Iterator[Any]:
            for weight in weights:
                self.note()
                arrived(weight)
                self.note()
                yield weight

        def load_and_note(weights: Iterable[Any], *arguments: Any, **named: Any) -> Any:
            loaded = load_weights(noted(weights), *arguments, **named)
            self.note()
            return loaded

        model.load_weights = load_and_note
        try:
            yield
        finally:
            del model.load_weights

    def _watch(self) -> None:
        while not self._ends.wait(self._last + self._limit_s - time.monotonic()):
            if time.monotonic() >= self._last + self._limit_s:
                self.has_hung_up = True
                self._hang_up()
                return


WAITING_SHARE = 0.5
Written = tuple[str, int]
"""The `Checksum` of the file, and its size in bytes."""


class TransferFile:
    """File that takes the weights of a transfer as they arrive.

    Args:
        path: of the file; one that is there is replaced.
        header: what precedes the data, with all tensors of the checkpoint.
        engine_dtype: in which the engine computes.
        room_bytes: how much may wait in memory; by default `WAITING_SHARE` of what is free. One tensor always may.
    """

    def __init__(self, path: Path, header: bytes, engine_dtype: torch.dtype, room_bytes: int | None = None) -> None:
        self._room_bytes = int(WAITING_SHARE * psutil.virtual_memory().available) if room_bytes is None else room_bytes
        self._path = path
        self._header = parse_header(header[LENGTH_BYTES:])
        self._entries = self._header.by_name
        self._missing = set(self._entries)
        self._engine_dtype = engine_dtype
        self._checksum = Checksum()
        self._failure: Exception | None = None
        self._thread = ThreadPoolExecutor(1)
        self._writes = deque([self._thread.submit(path.write_bytes, header)])
        """Those that wait or run; each returns its size in bytes."""
        self._waiting_bytes = len(header)
        self._written: Future[Written] | None = None

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Takes a copy. A second tensor of the same name replaces the first."""
        if self._failure is not None:
            return
        try:
            entry = self._entries.get(name)
            if entry is None or tuple(tensor.shape) != entry.shape:
                raise ValueError(f"the checkpoint has no tensor {name} of the shape {list(tensor.shape)}")
            room = self._room_bytes - entry.size_bytes
            while self._writes and (self._writes[0].done() or self._waiting_bytes > room):
                self._waiting_bytes -= self._writes.popleft().result()
            data = data_of(self._cast(entry, tensor))
            self._writes.append(self._thread.submit(self._write, entry, data))
            self._waiting_bytes += entry.size_bytes
        except Exception as failure:  # noqa: BLE001 - told by `written`
            self._failure = failure

    def written(self) -> tuple[Written | None, str | None]:
        """The weights once all are written, and the error, if any. No tensor may come after the first call."""
        if self._written is None:
            self._written = self._thread.submit(self._finish)
            self._thread.shutdown(wait=False)
        if not self._written.done():
            return None, None
        failure = self._written.exception()
        return (self._written.result(), None) if failure is None else (None, f"{type(failure).__name__}: {failure}")

    def discard(self) -> None:
        """Removes the file, once the tensor that is being written is there."""
        self._thread.shutdown(cancel_futures=True)
        self._path.unlink(missing_ok=True)

    def _cast(self, entry: TensorEntry, tensor: torch.Tensor) -> torch.Tensor:
        """The engine casts what it loads to its own dtype. Another one before that could round a value twice."""
        dtype = DTYPES[entry.dtype]
        cast = tensor.detach().to("cpu", dtype, copy=True)
        is_exact = dtype in (tensor.dtype, self._engine_dtype)
        if not is_exact and not torch.equal(cast.to(tensor.dtype), tensor.detach().cpu()):
            raise ValueError(f"{entry.name} is {tensor.dtype}, which the checkpoint's {entry.dtype} cannot hold")
        return cast

    def _write(self, entry: TensorEntry, data: Data) -> int:
        with self._path.open("r+b") as file:
            file.seek(self._header.data_begin + entry.begin)
            file.write(data)
        self._checksum.add(entry.name, entry.dtype, entry.shape, [data])
        self._missing.discard(entry.name)
        return entry.size_bytes

    def _finish(self) -> Written:
        """Runs after all writes, in their thread."""
        try:
            if self._failure is not None:
                raise self._failure
            for write in self._writes:
                write.result()
            if self._missing:
                message = f"{len(self._missing)} of {len(self._entries)} tensors were not sent, as {min(self._missing)}"
                raise ValueError(message)
        except Exception:
            self._path.unlink(missing_ok=True)
            raise
        return self._checksum.hexdigest(), self._header.file_bytes
