"""Requests that are asked for in one instant travel in one call, and come back as they finish."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from contextvars import Context
from functools import partial
from typing import Any, Generic, TypeVar

from ray.serve.exceptions import RayServeException

from deployments.failures import RolloutFailure
from deployments.rpc.handle_calls import call_result

Request = TypeVar("Request")
Result = TypeVar("Result")


class RequestBatcher(Generic[Request, Result]):
    """Asks one deployment, or one replica of it.

    Nothing waits for company: what is asked for until the event loop comes round again goes in one call, be it one
    request or a thousand. The more is going on, the later it comes round.
    """

    def __init__(
        self,
        call: Callable[[list[Request]], Any],
        lost: type[RolloutFailure],
        who: str,
        give_up: Callable[[list[Request]], Any] | None = None,
    ) -> None:
        """Args:
        call: starts a streaming call of requests, which yields `BatchResults`.
        lost: raised where the replica, or the way to it, broke; `who` is the subject of its sentence.
        give_up: starts a call that ends requests which nobody waits for any more, while others of their call are
            waited for; without it they end with the last of those.
        """
        self._call = call
        self._lost = lost
        self._who = who
        self._give_up = give_up
        self._asked_now: list[tuple[Request, asyncio.Future[Result]]] = []
        self._given_up_now: list[Request] = []
        self._calls: set[asyncio.Task[None]] = set()

    async def ask(self, request: Request) -> Result:
        """Raises what the replica answered for this request, or `lost`."""
        loop = asyncio.get_running_loop()
        if not self._asked_now:
            loop.call_soon(self._send)
        answer: asyncio.Future[Result] = loop.create_future()
        self._asked_now.append((request, answer))
        return await answer

    def _send(self) -> None:
        asked = [(request, waiting) for request, waiting in self._asked_now if not waiting.done()]
        self._asked_now = []
        if not asked:
            return
        call = self._start(self._answer_all(asked))
        unanswered, some_given_up = len(asked), False

        def note_end(request: Request, ended: "asyncio.Future[Result]") -> None:
            nonlocal unanswered, some_given_up
            unanswered -= 1
            some_given_up |= ended.cancelled()
            if some_given_up and not unanswered:
                call.cancel()
            elif ended.cancelled():
                self._note_given_up(request)

        for request, waiting in asked:
            waiting.add_done_callback(partial(note_end, request))

    def _start(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        # In no request's context: Serve would end the call, and all who share it, with the first one's HTTP request.
        task = asyncio.create_task(work, context=Context())
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        return task

    def _note_given_up(self, request: Request) -> None:
        if self._give_up is not None and not self._given_up_now:
            asyncio.get_running_loop().call_soon(self._send_given_up, self._give_up)
        self._given_up_now.append(request)

    def _send_given_up(self, give_up: Callable[[list[Request]], Any]) -> None:
        given_up, self._given_up_now = self._given_up_now, []
        self._start(self._end(give_up, given_up))

    async def _end(self, give_up: Callable[[list[Request]], Any], requests: list[Request]) -> None:
        # Where the replica is gone, so are they.
        with suppress(self._lost):
            call = give_up(requests)
            await call_result(call, call, self._lost, self._who)

    async def _answer_all(self, asked: Sequence[tuple[Request, "asyncio.Future[Result]"]]) -> None:
        """Hands each caller its answer as it comes; what breaks the call fails those that had none."""
        broken: Exception = self._lost(f"{self._who} ended the call without an answer.")
        call = None
        try:
            call = self._call([request for request, _ in asked])
            while answers := await call_result(anext(call, None), call, self._lost, self._who):
                for place, answer in answers:
                    settle(asked[place][1], answer)
        except RayServeException as error:
            broken = self._lost(f"{self._who} could not be reached: {error}")
        except Exception as error:  # noqa: BLE001 - it belongs to those who wait
            broken = error
            if call is not None:
                call.cancel()
        finally:
            for _, waiting in asked:
                settle(waiting, broken)


def settle(waiting: "asyncio.Future[Result]", answer: Result | Exception) -> None:
    if waiting.done():
        return
    if isinstance(answer, Exception):
        waiting.set_exception(answer)
    else:
        waiting.set_result(answer)
