"""Batched calls between deployments: the requests of one event-loop iteration travel in one message, of bounded size.

`CallBatcher` is the client half of all of them. At the server, `results_of` answers when all results are there, where
they take about as long as each other; `results_as_completed` yields each result as soon as it is there.

A large message holds the event loops of both ends while it is packed and unpacked, and gRPC refuses a message above
`RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH`: a batch above the bounds is divided into several messages. Sizes are
estimates: only packing a message tells its size.
"""

import asyncio
import logging
import pickle
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextvars import Context
from functools import partial
from typing import Any, Generic, TypeVar

import orjson

from deployments.failures import RolloutFailure
from deployments.protocols.generation import GenerationRequest
from deployments.protocols.model_server import ServedRequest
from deployments.protocols.token_columns import Columns
from deployments.rpc.background_tasks import BackgroundTasks
from rollout_env import ChatMessage, StepOutcome

Item = TypeVar("Item")

MOST_BYTES_PER_MESSAGE = 3 * 2**20
"""Below gRPC's own default of 4 MiB. A single request or result that is larger is a message of its own."""
MOST_ITEMS_PER_MESSAGE = 512
"""Packing so many short requests takes about 5 ms."""
BYTES_PER_TOKEN_ID = 4
BYTES_PER_LOGPROB = 4
BYTES_PER_RECORD = 200
"""Size of a request or a result without its texts and tokens."""


def divided(
    items: list[Item], bytes_of: Callable[[Item], int], most_items: int | None = MOST_ITEMS_PER_MESSAGE
) -> Iterator[list[Item]]:
    """Divides the items, in their order, into messages within both bounds, each as large as they allow.

    A single item above `MOST_BYTES_PER_MESSAGE` is a message of its own. No bound of the count if `most_items` is None.
    """
    if len(items) == 1:
        yield items
        return
    message: list[Item] = []
    message_bytes = 0
    for item in items:
        item_bytes = bytes_of(item)
        is_full = message_bytes + item_bytes > MOST_BYTES_PER_MESSAGE or len(message) == most_items
        if message and is_full:
            yield message
            message, message_bytes = [], 0
        message.append(item)
        message_bytes += item_bytes
    if message:
        yield message


def bytes_of_generation_request(request: GenerationRequest) -> int:
    stop_strings = sum(map(bytes_of_text, request.stop_strings))
    return BYTES_PER_RECORD + BYTES_PER_TOKEN_ID * len(request.prompt_token_ids) + stop_strings


def bytes_of_served_request(request: ServedRequest) -> int:
    return BYTES_PER_RECORD + len(request.body)


def bytes_of_conversation(messages: Sequence[ChatMessage]) -> int:
    return BYTES_PER_RECORD + bytes_of_json(messages)


def bytes_of_columns(columns: Columns) -> int:
    return sum(len(column.data) for column in columns.values())


def bytes_of_step_result(result: StepOutcome | RolloutFailure) -> int:
    if isinstance(result, RolloutFailure):
        return BYTES_PER_RECORD + bytes_of_text(str(result))
    return BYTES_PER_RECORD + bytes_of_json(
        (result.observations, result.answer, result.metadata, result.next_stop_strings)
    )


def bytes_of_text(text: str) -> int:
    """An upper bound: without a pass over the text."""
    return len(text) if text.isascii() else 4 * len(text)


def bytes_of_json(value: Any) -> int:
    try:
        return len(orjson.dumps(value))
    except TypeError:
        # orjson writes neither integers of more than 64 bits nor lone surrogates, which JSON may hold.
        return len(pickle.dumps(value))


Request = TypeVar("Request")
Result = TypeVar("Result")
Results = Sequence[Result | Exception]
"""In the order of the requests; an exception is raised by the call of its request."""
Send = Callable[[list[Request]], AsyncIterator[tuple[int, Result | Exception]]]
"""Makes one call with these requests. Yields each result with its request's place; what it raises fails the others."""
Waiting = list[tuple[Request, asyncio.Future[Result]]]


class CallBatcher(Generic[Request, Result]):
    """Sends the requests of one event-loop iteration, or of a few busy ones, in one call; each gets its own result.

    Guarantees: a quiet event loop adds no delay; requests are sent in the order in which they came; one whose caller
    has left before is not sent. Calls run in an empty context: Serve ends the calls of an HTTP request that its caller
    has left, and others wait for this one too.
    """

    def __init__(
        self,
        send: Send[Request, Result],
        bytes_of: Callable[[Request], int] = lambda _: 0,
        most_items: int | None = MOST_ITEMS_PER_MESSAGE,
        most_iterations: int | None = 1,
        most_calls: int | None = None,
        abandon: Callable[[Request], object] | None = None,
        on_broken: Callable[[int, Exception], None] | None = None,
    ) -> None:
        """Begins without requests.

        Args:
            bytes_of: the size of a request. A batch above `MOST_BYTES_PER_MESSAGE` is divided into several calls.
            most_items: a larger batch is divided too; `None` is no bound.
            most_iterations: requests are collected over so many iterations, if each brings some; `None` is no bound.
            most_calls: requests wait while so many calls are open; `None` is no bound.
            abandon: called with a request whose caller has left while others of its call go on. A call that all its
                callers have left is then cancelled. Without it the call goes on.
            on_broken: called with the exception that broke a call, and the number of requests without a result.
        """
        self._send = send
        self._bytes_of = bytes_of
        self._most_items = most_items
        self._most_iterations = most_iterations
        self._most_calls = most_calls
        self._abandon = abandon
        self._on_broken = on_broken
        self._collected: Waiting[Request, Result] = []
        self._waiting: Waiting[Request, Result] = []
        """Requests to send in this iteration and the next ones, or when a call ends."""
        self._is_scheduled = False
        self._calls = BackgroundTasks()

    async def call(self, request: Request) -> Result:
        """Sends the request with others. Raises the exception of this request, or of the whole call."""
        return await self.add(request)

    def add(self, request: Request) -> "asyncio.Future[Result]":
        """Sends the request with others, without waiting. Cancelling the future is how its caller leaves."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()
        if not self._collected:
            loop.call_soon(self._send_when_all_are_there, 0, 1)
        self._collected.append((request, future))
        return future

    def send_now(self) -> None:
        """Sends the collected requests: a control call that is made next reaches the replica after them."""
        self._waiting += self._collected
        self._collected = []
        self._send_next()

    def _send_when_all_are_there(self, before: int, iterations: int) -> None:
        there = len(self._collected)
        if there > before and iterations != self._most_iterations:
            asyncio.get_running_loop().call_soon(self._send_when_all_are_there, there, iterations + 1)
        else:
            self.send_now()

    def _send_next(self, scheduled: bool = False) -> None:
        """Starts one call in each event-loop iteration, because packing a large one holds the loop for milliseconds."""
        self._is_scheduled &= not scheduled
        self._waiting = [waiting for waiting in self._waiting if not waiting[1].done()]
        if not self._waiting or len(self._calls) == self._most_calls:
            return
        batch = list(next(divided(self._waiting, lambda waiting: self._bytes_of(waiting[0]), self._most_items)))
        del self._waiting[: len(batch)]
        self._start(batch)
        if self._waiting and not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._send_next, True)

    def _start(self, batch: Waiting[Request, Result]) -> None:
        call = self._calls.start(self._run(batch), Context())
        if self._most_calls is not None:
            call.add_done_callback(lambda _: self._send_next())
        if self._abandon is None:
            return
        abandon, pending, some_left = self._abandon, len(batch), False

        def note_end(request: Request, future: "asyncio.Future[Result]") -> None:
            nonlocal pending, some_left
            pending -= 1
            some_left |= future.cancelled()
            if some_left and not pending:
                call.cancel()
            elif future.cancelled():
                abandon(request)

        for request, future in batch:
            future.add_done_callback(partial(note_end, request))

    async def _run(self, batch: Waiting[Request, Result]) -> None:
        try:
            async for place, result in self._send([request for request, _ in batch]):
                _finish(batch[place][1], result)
        except Exception as error:  # noqa: BLE001 - the callers raise it
            without_result = [future for _, future in batch if not future.done()]
            if without_result and self._on_broken is not None:
                self._on_broken(len(without_result), error)
            for future in without_result:
                future.set_exception(error)
        finally:
            for _, future in batch:
                future.cancel()


def _finish(future: "asyncio.Future[Result]", result: Result | Exception) -> None:
    """Ends the future, unless its caller has left."""
    if future.done():
        return
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)


def at_once(call: Callable[[list[Request]], Awaitable[Results[Result]]]) -> Send[Request, Result]:
    """The `send` of a call that returns all results together."""

    async def send(requests: list[Request]) -> AsyncIterator[tuple[int, Result | Exception]]:
        for place, result in enumerate(await call(requests)):
            yield place, result

    return send


def group_commit(
    commit: Callable[[list[Request]], Awaitable[Results[Result]]],
    bytes_of: Callable[[Request], int] = lambda _: 0,
    most_items: int | None = None,
) -> CallBatcher[Request, Result]:
    """A batcher that makes one call at a time: requests that arrive during a call go together in the next one.

    Guarantee: requests are committed in the order in which they came.
    """
    return CallBatcher(at_once(commit), bytes_of, most_items, most_calls=1)


async def results_of(calls: Sequence[Awaitable[Result]]) -> list[Result | Exception]:
    """Runs the calls concurrently, at the server. A cancellation, or another `BaseException`, ends them all."""
    results = list[Result | Exception]()
    for result in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(result, BaseException) and not isinstance(result, Exception):
            raise result
        results.append(result)
    return results


logger = logging.getLogger("rollout_service.rpc")

BatchResults = list[tuple[int, Result | RolloutFailure]]
"""Each result with its request's place in the call."""


async def results_as_completed(
    jobs: Sequence[Awaitable[Result | RolloutFailure]],
    if_cancelled: RolloutFailure,
    bytes_of: Callable[[Result | RolloutFailure], int],
    wake: asyncio.Event | None = None,
) -> AsyncGenerator[BatchResults[Result], None]:
    """Runs all jobs concurrently and yields each result exactly once, as soon as it is there.

    The results of one event-loop iteration are yielded together, divided into batches within the bounds of
    this module. A job returns its failures; the result of a job that was cancelled is `if_cancelled`. Setting `wake`
    yields an empty batch if no result is there. Closing the generator cancels the jobs that still run.
    """
    finished: BatchResults[Result] = []
    some_finished = wake or asyncio.Event()

    def add_result(place: int, task: "asyncio.Future[Result | RolloutFailure]") -> None:
        finished.append((place, _result_of(task, if_cancelled)))
        some_finished.set()

    tasks = [asyncio.ensure_future(job) for job in jobs]
    for place, task in enumerate(tasks):
        task.add_done_callback(partial(add_result, place))
    missing = len(tasks)
    try:
        while missing:
            await some_finished.wait()
            some_finished.clear()
            batch = finished.copy()
            finished.clear()
            missing -= len(batch)
            for message in divided(batch, lambda result: bytes_of(result[1])) if batch else [batch]:
                yield message
    finally:
        for task in tasks:
            task.cancel()


def _result_of(
    task: "asyncio.Future[Result | RolloutFailure]", if_cancelled: RolloutFailure
) -> Result | RolloutFailure:
    """The result of a job that has ended in whatever way, so that its caller never waits in vain."""
    if task.cancelled():
        return if_cancelled
    error = task.exception()
    if error is None:
        return task.result()
    # A job catches every `Exception`. This is something else, such as the panic of a library in Rust.
    logger.warning("A call broke.", exc_info=error)
    return RolloutFailure(f"{type(error).__name__} was raised.")
