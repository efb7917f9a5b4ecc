"""Group commit: what comes while a commit runs is committed together after it."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextvars import Context
from typing import Generic, TypeVar

from deployments.rpc.batching import divided

Item = TypeVar("Item")
Result = TypeVar("Result")


class GroupCommit(Generic[Item, Result]):
    """Guarantee: one commit runs at a time, and the items are committed in the order in which they came.

    Args:
        commit: returns the result of each item in its place, or the exception that its caller raises. What it raises
            itself, each caller raises.
        bytes_of: the size of an item; commits are divided as messages are. `None`: all items are one commit.
    """

    def __init__(
        self,
        commit: Callable[[list[Item]], Awaitable[Sequence[Result | Exception]]],
        bytes_of: Callable[[Item], int] | None = None,
    ) -> None:
        self._commit = commit
        self._bytes_of = bytes_of or (lambda _: 0)
        self._pending: list[tuple[Item, asyncio.Future[Result]]] = []
        self._running: asyncio.Task[None] | None = None

    def put(self, item: Item) -> "asyncio.Future[Result]":
        """The result of the item, which is committed whether or not somebody waits for it."""
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._pending.append((item, future))
        if self._running is None:
            # An empty context: Serve ends the calls of a request that its caller has left, and others wait too.
            self._running = asyncio.create_task(self._run(), context=Context())
        return future

    async def _run(self) -> None:
        try:
            while self._pending:
                pending, self._pending = self._pending, []
                for batch in divided(pending, lambda one: self._bytes_of(one[0]), most_items=None):
                    await self._commit_batch(batch)
        finally:
            self._running = None

    async def _commit_batch(self, batch: "list[tuple[Item, asyncio.Future[Result]]]") -> None:
        results: Sequence[Result | Exception]
        try:
            results = await self._commit([item for item, _ in batch])
        except Exception as error:  # noqa: BLE001 - the callers raise it
            results = [error] * len(batch)
        for (_, future), result in zip(batch, results, strict=True):
            if future.done():
                continue
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)
