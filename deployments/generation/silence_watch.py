"""Notices that a trainer has fallen silent in the middle of a transfer, where vLLM's backends would wait on and on."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from threading import Event, Thread
from types import TracebackType
from typing import Any, Self, TypeVar

Item = TypeVar("Item")


class SilenceWatch:
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
    def noting_weights_of(self, model: Any, arrived: Callable[[Any], None]) -> Iterator[None]:
        """Notes each tensor that `model.load_weights` takes, which `arrived` is called with before, and its end."""
        load_weights = model.load_weights

        def load_and_note(weights: Iterable[Any], *arguments: Any, **named: Any) -> Any:
            loaded = load_weights(self._noted(weights, arrived), *arguments, **named)
            self.note()
            return loaded

        model.load_weights = load_and_note
        try:
            yield
        finally:
            del model.load_weights

    def _noted(self, items: Iterable[Item], arrived: Callable[[Item], None]) -> Iterator[Item]:
        for item in items:
            self.note()
            arrived(item)
            self.note()
            yield item

    def _watch(self) -> None:
        while not self._ends.wait(self._last + self._limit_s - time.monotonic()):
            if time.monotonic() >= self._last + self._limit_s:
                self.has_hung_up = True
                self._hang_up()
                return
