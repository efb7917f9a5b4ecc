"""A client that goes away, as Serve's proxy says it: it cancels its own call of the ingress replica, or dies."""

from ray.exceptions import ActorDiedError, ActorUnavailableError, TaskCancelledError
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class ServeDisconnects:
    """Gives the application a disconnect where Serve raises the cancellation of the proxy's call, or the proxy's death.

    A proxy takes the connections of its clients with it. Otherwise each client that goes away would be an unexpected
    error, with three tracebacks in the log.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def receive_or_disconnect() -> Message:
            try:
                return await receive()
            except (TaskCancelledError, ActorDiedError, ActorUnavailableError):
                return {"type": "http.disconnect"}

        await self._app(scope, receive_or_disconnect, send)
