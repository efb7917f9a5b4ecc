"""A worker's end of a transfer from a trainer: the rendezvous, and a watch of the trainer.

The worker meets the trainer in a thread, so that the engine goes on generating. It takes the connection only if the
rendezvous was not given up before it was complete, and takes part in one rendezvous at a time, because two would take
each other's rank at the trainer. vLLM's own cannot be interrupted: one that was given up ends when vLLM's time limit
does (minutes) or when the trainer's process ends, and holds up the next one until then.

`TrainerWatch` notices a trainer that falls silent, where vLLM's backends would wait on and on.
"""

import logging
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from threading import Event, Lock, Thread
from types import TracebackType
from typing import Any, Self, TypeVar

import torch

PROBE_TIMEOUT_S = 1.0
PROBE_PAUSE_S = 0.1
JOIN_S = 0.1
EARLIER = "an earlier rendezvous, which was given up, has not ended"
logger = logging.getLogger("rollout_service.generation")


class TrainerRendezvous:
    """Begins at once.

    Args:
        engine: of vLLM, not connected yet; its `init_transfer_engine` is called.
        init_info: as `engine.parse_init_info` returns it.
        earlier: the last rendezvous of this worker, which may go on although it was given up.
    """

    def __init__(self, engine: Any, init_info: Any, earlier: "TrainerRendezvous | None" = None) -> None:
        self.waits_for = "the trainer does not answer"
        """The step that is waited for, for messages."""
        self._engine = engine
        self._init_info = init_info
        self._earlier = earlier
        self._error: str | None = None
        self._has_ended = False
        self._given_up = Event()
        self._deciding = Lock()
        # A daemon: the worker's process has to end even if the trainer never answers.
        self._thread = Thread(target=self._run, name="trainer-rendezvous", daemon=True)
        self._thread.start()

    def state(self) -> tuple[bool, str | None]:
        """Whether it has ended, and why it failed, if it did."""
        return self._has_ended, self._error

    def connection(self) -> Any:
        """The engine, connected to the trainer. Call it only once `state` says that it has ended without an error."""
        return self._engine

    def give_up(self) -> None:
        """Nobody takes the connection any more: it is closed, at once or when it is complete."""
        with self._deciding:
            self._given_up.set()
            if self._has_ended:
                self._engine.shutdown()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Returns whether the thread has ended within `timeout_s` seconds."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._meet()
        except Exception as failure:  # noqa: BLE001 - told by `state`
            self._error = f"{type(failure).__name__}: {failure}"
        with self._deciding:
            self._has_ended = True
            if self._given_up.is_set():
                self._engine.shutdown()

    def _meet(self) -> None:
        if self._awaits(EARLIER, self._earlier_has_ended) and self._awaits_listener():
            _use_device(getattr(self._engine, "device", None))
            self._engine.init_transfer_engine(self._init_info)

    def _earlier_has_ended(self) -> bool:
        if self._earlier is not None and not self._earlier.wait(JOIN_S):
            return False
        self._earlier = None
        return True

    def _awaits_listener(self) -> bool:
        """vLLM begins only when it will find somebody: what it has begun it does not end for minutes."""
        host = getattr(self._init_info, "master_address", None)
        port = getattr(self._init_info, "master_port", None)
        if host is None or port is None:
            return True
        return self._awaits(f"nobody listens at {host}:{port}", lambda: listens(host, port))

    def _awaits(self, what: str, has_happened: Callable[[], bool]) -> bool:
        """Returns true once it has, or false if the rendezvous is given up before."""
        waited_for, self.waits_for = self.waits_for, what
        while not has_happened():
            if self._given_up.wait(PROBE_PAUSE_S):
                return False
        self.waits_for = waited_for
        return not self._given_up.is_set()


def listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), PROBE_TIMEOUT_S).close()
    except OSError:
        return False
    return True


def _use_device(device: torch.device | None) -> None:
    """vLLM's backends take the current device of their thread."""
    if device is not None and device.type != "cpu":
        torch.accelerator.set_device_index(device)


Item = TypeVar("Item")


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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ends.set()
        self._thread.join()

    def note(self) -> None:
        self._last = time.monotonic()

    @contextmanager
    def noting_weights_of(self, model: Any) -> Iterator[None]:
        """Notes each tensor that `model.load_weights` takes, and its end."""
        load_weights = model.load_weights

        def load_and_note(weights: Iterable[Any], *arguments: Any, **named: Any) -> Any:
            loaded = load_weights(self._noted(weights), *arguments, **named)
            self.note()
            return loaded

        model.load_weights = load_and_note
        try:
            yield
        finally:
            del model.load_weights

    def _noted(self, items: Iterable[Item]) -> Iterator[Item]:
        for item in items:
            self.note()
            yield item

    def _watch(self) -> None:
        while not self._ends.wait(self._last + self._limit_s - time.monotonic()):
            if time.monotonic() >= self._last + self._limit_s:
                self.has_hung_up = True
                self._hang_up()
                return
