"""A client that goes away, as Serve says it: it cancels its own call of the ingress replica, or its proxy dies.

Guarantee: when clients leave by the hundred in one moment, at most `ENDS_PER_ITERATION` of their requests end in one
iteration of the event loop, which has time for other requests between them.
"""

import asyncio

from ray.exceptions import ActorDiedError, ActorUnavailableError, TaskCancelledError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.rollouts.pacing import LoopPacer

ENDS_PER_ITERATION = 16
"""To give up a request, with its rollouts and calls, takes 0.1 to 0.5 ms."""


class ServeDisconnects:
    """Gives the application a disconnect where Serve raises the cancellation of the proxy's call, or the proxy's death.

    A proxy takes the connections of its clients with it. Otherwise each client that goes away would be an unexpected
    error, with three tracebacks in the log.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._ends = LoopPacer(ENDS_PER_ITERATION)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def receive_or_disconnect() -> Message:
            try:
                return await receive()
            except (TaskCancelledError, ActorDiedError, ActorUnavailableError):
                await self._ends.wait_for_turn(receive_or_disconnect)
                return {"type": "http.disconnect"}

        # In a task of its own, which Serve does not cancel.
        answering = asyncio.ensure_future(self._app(scope, receive_or_disconnect, send))
        try:
            await asyncio.wait({answering})
        except asyncio.CancelledError:
            await self._end(answering)
            raise
        answering.result()

    async def _end(self, answering: "asyncio.Future[None]") -> None:
        """Cancels the task when its turn has come, or when this is cancelled."""
        try:
            await self._ends.wait_for_turn(answering)
        finally:
            answering.cancel()
            await asyncio.wait({answering})
