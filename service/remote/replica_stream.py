"""Batched calls of a replica: streams of results, and control calls. Server half: `deployments/rpc/batching.py`.

A hung replica is detected by its heartbeats, which stop; the replica's half is `deployments/rpc/liveness.py`.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

from ray.serve.exceptions import RayServeException

from deployments.failures import RolloutFailure
from deployments.rpc.batching import MOST_ITEMS_PER_MESSAGE, BatchResults, CallBatcher
from deployments.rpc.handle_calls import call_result
from deployments.rpc.liveness import HEARTBEAT_S
from deployments.upstream.ray_serve.serve_internals import cancel_call


class _ReplicaSilent(Exception):
    """Nothing came from the replica for too many heartbeats."""

    def __init__(self, heartbeats: int) -> None:
        super().__init__(heartbeats)
        self.heartbeats = heartbeats


class ReplicaWatch:
    """Breaks the open calls of one replica when nothing came on any of them for `lost_after` heartbeats.

    All calls that name the replica share one watch, whatever they ask for: the replica sends its heartbeats on one of
    them alone.

    Silence counts only after a first item: a call that waits for a replica to start is silent for minutes. It is
    counted in ticks of this event loop, so that a loop that was itself stalled does not blame the replica.
    """

    def __init__(self, lost_after: int) -> None:
        self._lost_after = lost_after
        self._open: set[asyncio.Timeout] = set()
        self._was_heard = False
        self._silent_ticks = 0
        self._timer: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def watch(self) -> AsyncGenerator[None]:
        """Watches the open call that is made in the block. Raises `_ReplicaSilent` when the replica is silent."""
        limit = asyncio.timeout(None)
        try:
            async with limit:
                self._open.add(limit)
                if self._timer is None:
                    self._start_timer()
                yield
        except TimeoutError as error:
            if limit.expired():
                raise _ReplicaSilent(self._lost_after) from error
            raise
        finally:
            self._open.discard(limit)
            if not self._open:
                self.forget()

    def note_item(self) -> None:
        """Records an item of one of the calls."""
        self._was_heard = True
        self._silent_ticks = 0

    def forget(self) -> None:
        """Forgets that the replica was heard, which may be gone: silence counts again after the next item."""
        self._was_heard = False
        self._silent_ticks = 0

    def _start_timer(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(HEARTBEAT_S, self._tick)

    def _tick(self) -> None:
        self._timer = None
        if not self._open:
            return
        self._start_timer()
        self._silent_ticks += self._was_heard
        if self._silent_ticks >= self._lost_after:
            self.forget()
            for limit in self._open:
                limit.reschedule(asyncio.get_running_loop().time())


logger = logging.getLogger("rollout_service.remote")

Request = TypeVar("Request")
Result = TypeVar("Result")
_NO_FIELDS: Mapping[str, Any] = {}
MOST_ITERATIONS_PER_CALL = 4
"""An iteration of a busy event loop lets up to 64 rollouts go on (`service/rollouts/pacing.py`) and takes 6 ms."""


def streamed_calls(
    start_call: Callable[[list[Request]], Any],
    lost: type[RolloutFailure],
    who: str,
    log_fields: Mapping[str, Any] = _NO_FIELDS,
    results_of: Callable[[Any], BatchResults[Result]] = lambda item: item,
    silence: ReplicaWatch | None = None,
    bytes_of: Callable[[Request], int] = lambda _: 0,
    abandon: Callable[[Request], object] | None = None,
    most_items: int | None = MOST_ITEMS_PER_MESSAGE,
    most_iterations: int | None = MOST_ITERATIONS_PER_CALL,
) -> CallBatcher[Request, Result]:
    """Batches the requests for one deployment, or one replica of it, into streaming calls.

    A call costs the event loop about a millisecond: the busier it is, the more requests should go into one.

    Args:
        start_call: starts a streaming call with these requests. `results_of` gives the results in an item of it.
        lost: raised when the replica, or the connection to it, breaks; `who` is the subject of its message.
        log_fields: the `extra` of log records.
        silence: the replica sends a heartbeat each second, and is `lost` when this misses too many. Streams of the same
            replica share it. `None` if the replica sends none.
        abandon: as in `CallBatcher`.
    """

    async def results(requests: list[Request]) -> AsyncIterator[tuple[int, Result | Exception]]:
        call, missing = None, len(requests)
        try:
            call = start_call(requests)
            async with nullcontext() if silence is None else silence.watch():
                while (item := await call_result(anext(call, None), call, lost, who)) is not None:
                    if silence is not None:
                        silence.note_item()
                    for result in results_of(item):
                        missing -= 1
                        yield result
        except RayServeException as error:
            # Its message may hold addresses, and stays in the log.
            raise lost(f"{who} could not be reached.") from error
        except Exception as error:
            if silence is not None:
                silence.forget()
            if call is not None:
                cancel_call(call)
            if isinstance(error, _ReplicaSilent):
                raise lost(f"{who} was silent for {error.heartbeats} heartbeats.") from error
            raise
        if missing:
            raise lost(f"{who} ended the call without an answer.")

    def log_broken(missing: int, broken: Exception) -> None:
        # A lost replica is told by its sentence: the stack of the call that noticed it would add nothing.
        is_lost = isinstance(broken, lost)
        message = "A call broke before %d of its requests had a result: %s"
        extra = {**log_fields, "cause": repr(broken.__cause__)} if is_lost else log_fields
        logger.warning(message, missing, broken, exc_info=None if is_lost else broken, extra=extra)

    return CallBatcher(results, bytes_of, most_items, most_iterations, abandon=abandon, on_broken=log_broken)


def control_calls(
    start_call: Callable[[list[Request]], Any],
    done: str,
    lost: type[RolloutFailure],
    who: str,
    log_fields: Mapping[str, Any] = _NO_FIELDS,
) -> CallBatcher[Request, None]:
    """Batches calls about running requests, such as their abortion, whose results nobody waits for.

    Args:
        start_call: starts a call about these requests. One that fails is logged.
        done: the participle of what the call does, for the log.
    """

    async def send(requests: list[Request]) -> AsyncIterator[tuple[int, None]]:
        not_done = f"{len(requests)} requests were not {done}"
        await call_unless_gone(partial(start_call, requests), lost, who, not_done, log_fields)
        for place in range(len(requests)):
            yield place, None

    return CallBatcher(send)


async def call_unless_gone(
    start_call: Callable[[], Any],
    lost: type[RolloutFailure],
    who: str,
    not_done: str,
    log_fields: Mapping[str, Any] = _NO_FIELDS,
) -> None:
    """Makes a call that stops something at a replica. One that fails is logged as `not_done`: a lost replica does it no
    longer."""
    try:
        call = start_call()
        await call_result(call, call, lost, who)
    except (lost, RayServeException) as error:
        logger.info("%s: %s", not_done, error, extra=log_fields)
    except Exception:
        logger.exception("%s.", not_done, extra=log_fields)
