"""Batches of one event-loop iteration."""

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

Item = TypeVar("Item")


class IterationBatcher(Generic[Item]):
    """Hands over, in one list, the items that came in one event-loop iteration; adds no delay."""

    def __init__(self, send: Callable[[list[Item]], None]) -> None:
        """Args: `send` takes at least one item, in the order in which they came."""
        self._send = send
        self._items: list[Item] = []

    def add(self, item: Item) -> None:
        if not self._items:
            asyncio.get_running_loop().call_soon(self._hand_over)
        self._items.append(item)

    def _hand_over(self) -> None:
        items, self._items = self._items, []
        self._send(items)
