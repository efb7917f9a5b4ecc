"""Paces the requests that Serve gives to the application, and tells it when a client disconnects.

Serve's proxy cancels its own call of the ingress replica when a client goes away, and takes the connections of its
clients with it when it dies.

Guarantee: when requests come, are answered, or their clients leave, by the hundred in one moment, at most
`STEPS_PER_ITERATION` of them begin, get a message, send one or end in one iteration of the event loop, which has time
for other requests between them.
"""

import asyncio

from ray.exceptions import ActorDiedError, ActorUnavailableError, OutOfMemoryError, TaskCancelledError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.rollouts.pacing import LoopPacer

STEPS_PER_ITERATION = 16
"""A step takes 0.1 to 2 ms: to route a request, to copy a part of its body, or to give it up
with its rollouts and calls."""


def request_pacer() -> LoopPacer:
    """The pacer of the requests of one ingress replica."""
    return LoopPacer(STEPS_PER_ITERATION)


class ServeRequests:
    """Gives the application a disconnect where Serve raises the cancellation of the proxy's call, or the proxy's death.

    Otherwise each client that goes away would be an unexpected error, with three tracebacks in the log.
    """

    def __init__(self, app: ASGIApp, pacer: LoopPacer) -> None:
        self._app = app
        self._pacer = pacer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def receive_in_turn() -> Message:
            try:
                message = await receive()
            except (TaskCancelledError, ActorDiedError, ActorUnavailableError, OutOfMemoryError):
                message = {"type": "http.disconnect"}
            await self._pacer.wait_for_turn(receive)
            return message

        async def send_in_turn(message: Message) -> None:
            await self._pacer.wait_for_turn(send)
            await send(message)

        await self._pacer.wait_for_turn(receive)
        # In a task of its own, which Serve does not cancel.
        answering = asyncio.ensure_future(self._app(scope, receive_in_turn, send_in_turn))
        try:
            await asyncio.wait({answering})
        except asyncio.CancelledError:
            await self._end(answering)
            raise
        answering.result()

    async def _end(self, answering: "asyncio.Future[None]") -> None:
        """Cancels the task when its turn has come, or when this is cancelled."""
        try:
            await self._pacer.wait_for_turn(answering)
        finally:
            answering.cancel()
            await asyncio.wait({answering})
