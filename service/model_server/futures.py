"""Answers that their callers ask for later, by a name: Tinker's futures. Those of one ingress replica.

Guarantees: the work of a name is started once, however often it is asked to; a caller sees only futures of its own key;
work that nobody asks for is cancelled, and its answer dropped, after `FORGET_AFTER_S`; the answers that are kept are
together at most `most_bytes`, of which those that ended first are dropped first.
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import Context
from dataclasses import dataclass
from typing import Any

from deployments.rpc.background_tasks import BackgroundTasks
from deployments.upstream.ray_serve.own_replica import has_died, is_name_of_replica, own_name
from rollout_client.contract.problems import FieldProblem
from service.problems import FUTURE_LOST, RequestProblem

FORGET_AFTER_S = 300.0
"""A client that polls asks again at once; its process may be stopped for a while."""
MOST_BYTES = 2**28
BYTES_OF_A_FUTURE = 2**11
"""Memory of a future beside its answer, about."""
_OWNER = "@"
"""Stands between the name of a future and the ingress replica that has it."""
Name = tuple[str, str]
"""The namespace of a key, and an id within it."""


@dataclass(frozen=True, slots=True)
class FutureAnswer:
    """The body of an answer, as its client reads it."""

    body: bytes
    media_type: str


@dataclass(slots=True)
class Future:
    """Work whose answer is asked for later."""

    task: "asyncio.Task[FutureAnswer]"
    timer: asyncio.TimerHandle | None = None
    """Forgets it."""
    size_bytes: int = 0
    """Size of its answer, once it has ended."""


class FutureElsewhere(Exception):
    """Another ingress replica has the future, and lives."""


def _replica_is_gone(name: str) -> bool:
    return not is_name_of_replica(name) or has_died(name)


class Futures:
    """The futures of one ingress replica.

    Args:
        most_bytes: bound of the answers that are kept.
        is_gone: whether the ingress replica of this name has died; may block.
    """

    def __init__(self, most_bytes: int = MOST_BYTES, is_gone: Callable[[str], bool] = _replica_is_gone) -> None:
        self._owner = own_name()
        self._most_bytes = most_bytes
        self._is_gone = is_gone
        self._futures: dict[Name, Future] = {}
        """Those that have ended are in the order in which they did."""
        self._bytes = 0
        self._tasks = BackgroundTasks()

    def __len__(self) -> int:
        return len(self._futures)

    def start(
        self,
        namespace: str,
        name: str,
        work: Callable[[], Coroutine[Any, Any, FutureAnswer]],
        on_end: Callable[[], None],
    ) -> str:
        """Starts the work, unless it was before, and returns the id by which its answer is asked for.

        Args:
            namespace: of the caller's key.
            on_end: is called exactly once, when the work has ended; at once if it is not started.
        """
        future_id = f"{name}{_OWNER}{self._owner}"
        key = namespace, future_id
        if key in self._futures:
            on_end()
            return future_id
        task = self._tasks.start(work(), Context())
        self._futures[key] = Future(task)
        task.add_done_callback(lambda _: on_end())
        task.add_done_callback(lambda done: self._note_end(key, done))
        self._forget_after(FORGET_AFTER_S, key)
        return future_id

    async def answer(self, namespace: str, future_id: str, wait_s: float) -> FutureAnswer | None:
        """The answer; `None` if there is none within `wait_s` seconds.

        Raises:
            FutureElsewhere: another replica has it.
            RequestProblem: 410, it is not kept any longer, or its work cannot succeed here now.
        """
        key = namespace, future_id
        if (future := self._futures.get(key)) is None:
            _, _, owner = future_id.rpartition(_OWNER)
            if owner != self._owner and not await asyncio.to_thread(self._is_gone, owner):
                raise FutureElsewhere
            raise future_lost("no replica keeps it any longer; send the call again", future_id)
        self._forget_after(wait_s + FORGET_AFTER_S, key)
        await asyncio.wait({future.task}, timeout=wait_s)
        if not future.task.done():
            return None
        if future.task.cancelled():
            raise future_lost("it was cancelled; send the call again", future_id)
        return future.task.result()

    def cancel(self, namespace: str, future_id: str) -> None:
        """Ends the work and forgets it. Unknown ids are ignored."""
        if (future := self._futures.pop((namespace, future_id), None)) is None:
            return
        if future.timer is not None:
            future.timer.cancel()
        future.task.cancel()
        self._bytes -= future.size_bytes

    def _forget_after(self, seconds: float, key: Name) -> None:
        future = self._futures[key]
        if future.timer is not None:
            future.timer.cancel()
        future.timer = asyncio.get_running_loop().call_later(seconds, self.cancel, *key)

    def _note_end(self, key: Name, done: "asyncio.Task[FutureAnswer]") -> None:
        failed = done.cancelled() or done.exception() is not None
        if (future := self._futures.pop(key, None)) is None:
            return
        self._futures[key] = future
        future.size_bytes = BYTES_OF_A_FUTURE + (0 if failed else len(done.result().body))
        self._bytes += future.size_bytes
        while self._bytes > self._most_bytes:
            self.cancel(*next(name for name, one in self._futures.items() if one.size_bytes))


def future_lost(message: str, future_id: str) -> RequestProblem:
    return RequestProblem(FUTURE_LOST, [FieldProblem(field="request_id", message=message, value=future_id)])
