"""The client half of batching: sends many requests in one call. Server half: `deployments/rpc/batching.py`."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import nullcontext
from contextvars import Context
from functools import partial
from typing import Any, Generic, TypeVar

from ray.serve.exceptions import RayServeException

from deployments.failures import RolloutFailure
from deployments.rpc.batching import BatchResults, IterationBatcher
from deployments.rpc.handle_calls import call_result, cancel_call
from deployments.rpc.message_size import MOST_ITEMS_PER_MESSAGE, divided
from service.remote.replica_watch import ReplicaSilent, ReplicaWatch

logger = logging.getLogger("rollout_service.remote")

Request = TypeVar("Request")
Result = TypeVar("Result")
Batch = list[tuple[Request, "asyncio.Future[Result]"]]
NO_FIELDS: Mapping[str, Any] = {}
MOST_ITERATIONS_PER_CALL = 4
"""An iteration of a busy event loop lets up to 64 rollouts go on (`service/rollouts/pacing.py`) and takes 6 ms."""


class ControlCalls(Generic[Request]):
    """Coalesces what one event-loop iteration asks of running requests, such as their abortion, into one call."""

    def __init__(
        self,
        call: Callable[[list[Request]], Any],
        done: str,
        lost: type[RolloutFailure],
        who: str,
        log_fields: Mapping[str, Any] = NO_FIELDS,
    ) -> None:
        """Args:
        call: starts a call about these requests. Its result is not waited for; a call that fails is logged.
        done: what the call does, as a participle, for the log.
        """
        self._call = call
        self._done = done
        self._lost = lost
        self._who = who
        self._log_fields = log_fields
        self._tasks: set[asyncio.Task[None]] = set()
        self.add = IterationBatcher(self._send).add

    def _send(self, requests: list[Request]) -> None:
        start_task(self._run(requests), self._tasks)

    async def _run(self, requests: list[Request]) -> None:
        not_done = f"{len(requests)} requests were not {self._done}"
        await call_unless_gone(partial(self._call, requests), self._lost, self._who, not_done, self._log_fields)


class RequestBatcher(Generic[Request, Result]):
    """Coalesces the requests of consecutive event-loop iterations into one RPC, until one has brought none.

    A quiet event loop adds no delay. The busier it is, the longer its iterations are and the more requests go into one
    call, which costs the event loop about a millisecond. One batcher calls one deployment, or one replica of it.
    """

    def __init__(
        self,
        start_call: Callable[[list[Request]], Any],
        lost: type[RolloutFailure],
        who: str,
        abort: ControlCalls[Request] | None = None,
        log_fields: Mapping[str, Any] = NO_FIELDS,
        results_of: Callable[[Any], BatchResults[Result]] = lambda item: item,
        silence: ReplicaWatch | None = None,
        bytes_of: Callable[[Request], int] = lambda _: 0,
        most_requests: int | None = MOST_ITEMS_PER_MESSAGE,
        most_iterations: int | None = MOST_ITERATIONS_PER_CALL,
    ) -> None:
        """Args:
        start_call: starts a streaming call with these requests. `results_of` gives the results in an item of it.
        lost: raised when the replica, or the connection to it, breaks; `who` is the subject of its message.
        abort: aborts requests whose callers were cancelled while others of their call go on. Without it they run
            until the last of those has its result.
        log_fields: the `extra` of the log records of this batcher.
        silence: the replica sends a heartbeat each second, and is `lost` when this misses too many. Batchers whose
            calls name the same replica share it. `None` if the replica sends none.
        bytes_of: the size of a request. A batch above `MOST_BYTES_PER_MESSAGE` is divided into several calls.
        most_requests: a batch of more is divided too, unless this is `None`.
        most_iterations: a call is sent after so many iterations also if each has brought requests. `None`: it is not.
        """
        self._start_call = start_call
        self._lost = lost
        self._who = who
        self._abort = abort
        self._log_fields = log_fields
        self._results_of = results_of
        self._silence = silence
        self._bytes_of = bytes_of
        self._most_requests = most_requests
        self._most_iterations = most_iterations
        self._to_send: list[tuple[Request, asyncio.Future[Result]]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def call(self, request: Request) -> Result:
        """Sends the request with those of these event-loop iterations. Cancelling the call aborts the request.

        Raises:
            RolloutFailure: `lost`, or the failure that the replica returned for this request.
            Exception: what the whole call raised.
        """
        loop = asyncio.get_running_loop()
        if not self._to_send:
            loop.call_soon(self._send_when_all_are_there, 0, 1)
        future: asyncio.Future[Result] = loop.create_future()
        self._to_send.append((request, future))
        return await future

    def send_now(self) -> None:
        """Sends what is collected: a control call that is made next reaches the replica after it."""
        if self._to_send:
            self._send()

    def _send_when_all_are_there(self, before: int, iterations: int) -> None:
        """Args:
        before: how many requests there were one iteration ago.
        iterations: the number of iterations in which requests were collected.
        """
        there = len(self._to_send)
        if there > before and iterations != self._most_iterations:
            asyncio.get_running_loop().call_soon(self._send_when_all_are_there, there, iterations + 1)
        else:
            self._send()

    def _send(self) -> None:
        calls = divided(self._to_send, lambda sent: self._bytes_of(sent[0]), self._most_requests)
        self._to_send = []
        self._send_next(calls)

    def _send_next(self, calls: "Iterator[Batch[Request, Result]]") -> None:
        """Starts one call in each event-loop iteration, because packing a large one holds the loop for milliseconds."""
        batch = next(calls, None)
        if batch is not None:
            self._send_call([(request, future) for request, future in batch if not future.done()])
            asyncio.get_running_loop().call_soon(self._send_next, calls)

    def _send_call(self, batch: "Batch[Request, Result]") -> None:
        if not batch:
            return
        call = start_task(self._run_call(batch), self._tasks)
        pending, some_cancelled = len(batch), False

        def note_end(request: Request, future: "asyncio.Future[Result]") -> None:
            nonlocal pending, some_cancelled
            pending -= 1
            some_cancelled |= future.cancelled()
            if some_cancelled and not pending:
                call.cancel()
            elif future.cancelled() and self._abort is not None:
                self._abort.add(request)

        for request, future in batch:
            future.add_done_callback(partial(note_end, request))

    async def _run_call(self, batch: Sequence[tuple[Request, "asyncio.Future[Result]"]]) -> None:
        """Gives each caller its result as soon as it is there. What breaks the call fails the callers without one."""
        broken: Exception = self._lost(f"{self._who} ended the call without an answer.")
        call = None
        try:
            call = self._start_call([request for request, _ in batch])
            await self._give_results(call, batch)
        except RayServeException as error:
            # What it says may hold addresses, and stays in the log.
            broken = self._lost(f"{self._who} could not be reached.")
            broken.__cause__ = error
        except Exception as error:  # noqa: BLE001 - the callers raise it
            broken = error
            if self._silence is not None:
                self._silence.forget()
            if call is not None:
                cancel_call(call)
        finally:
            self._fail([future for _, future in batch if not future.done()], broken)

    async def _give_results(self, call: Any, batch: Sequence[tuple[Request, "asyncio.Future[Result]"]]) -> None:
        """Returns when the call has ended. Raises what breaks it; `lost` if the replica is silent for too long."""
        silence = self._silence
        try:
            async with nullcontext() if silence is None else silence.watch():
                while (item := await call_result(anext(call, None), call, self._lost, self._who)) is not None:
                    if silence is not None:
                        silence.note_item()
                    for place, result in self._results_of(item):
                        finish(batch[place][1], result)
        except ReplicaSilent as silent:
            raise self._lost(f"{self._who} was silent for {silent.heartbeats} heartbeats.") from silent

    def _fail(self, futures: "Sequence[asyncio.Future[Result]]", broken: Exception) -> None:
        if futures:
            # A lost replica is told by its sentence: the stack of the call that noticed it would say nothing more.
            lost = isinstance(broken, self._lost)
            message = "A call broke before %d of its requests had a result: %s"
            extra = {**self._log_fields, "cause": repr(broken.__cause__)} if lost else self._log_fields
            logger.warning(message, len(futures), broken, exc_info=None if lost else broken, extra=extra)
        for future in futures:
            future.set_exception(broken)


async def call_unless_gone(
    start_call: Callable[[], Any],
    lost: type[RolloutFailure],
    who: str,
    not_done: str,
    log_fields: Mapping[str, Any] = NO_FIELDS,
) -> None:
    """Makes a call that stops something at a replica. One that is gone does it no longer: that is logged as `not_done`.

    Raises:
        Exception: what the replica raised.
    """
    try:
        call = start_call()
        await call_result(call, call, lost, who)
    except (lost, RayServeException) as error:
        logger.info("%s: %s", not_done, error, extra=log_fields)


def finish(future: "asyncio.Future[Result]", result: Result | Exception) -> None:
    """Ends the future, unless its caller was cancelled."""
    if future.done():
        return
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)


def start_task(work: Coroutine[Any, Any, None], tasks: "set[asyncio.Task[None]]") -> "asyncio.Task[None]":
    """Starts `work` as a task that stays in `tasks` until it is done.

    In an empty context: in the context of an HTTP request Serve would cancel the call, which others share, with it.
    """
    task = asyncio.create_task(work, context=Context())
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task
