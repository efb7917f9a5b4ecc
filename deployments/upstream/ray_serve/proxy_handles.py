"""Handles of Serve's proxies, which an ingress replica asks for the messages of each request, looked up once.

Serve looks its proxy up for every request: the event loop waits for an answer of Ray's GCS, for about 0.3 ms, and for a
minute while there is no GCS.

Needed with Ray 2.60; no upstream issue is known.
"""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import ray
from ray.exceptions import ActorDiedError, OutOfMemoryError
from ray.serve._private.common import RequestMetadata, StreamingHTTPRequest
from ray.serve._private.constants import SERVE_NAMESPACE

WaitForTurn = Callable[[str], Awaitable[None]]
"""Lets the requests of an event loop go on in turn, by their ids."""


class _ProxyHandles:
    """By name, each looked up once in the life of its proxy.

    A proxy that is started again has the name of the one that died: a request that gets that one's death asks the new
    one.
    """

    def __init__(self, look_up: Callable[[str], Any], wait_for_turn: WaitForTurn) -> None:
        """Begins without handles.

        Args:
            look_up: raises `ValueError` if there is no such actor.
            wait_for_turn: awaited before a request asks, and before it takes what it receives.
        """
        self._look_up = look_up
        self._wait_for_turn = wait_for_turn
        self._by_name: dict[str, Any] = {}

    async def receive_asgi_messages(self, name: str, request: RequestMetadata) -> bytes:
        """Raises `ActorDiedError` or `OutOfMemoryError`: the proxy died, and the request with it."""
        handle = self._handle(name)
        try:
            return await self._received(handle, request)
        except (ActorDiedError, OutOfMemoryError):
            if self._by_name.get(name) is handle:
                del self._by_name[name]
            newer = self._handle(name)
            if newer._actor_id == handle._actor_id:
                raise
        return await self._received(newer, request)

    async def _received(self, handle: Any, request: RequestMetadata) -> bytes:
        await self._wait_for_turn(request.request_id)
        messages: bytes = await handle.receive_asgi_messages.remote(request)
        await self._wait_for_turn(request.request_id)
        return messages

    def _handle(self, name: str) -> Any:
        if name not in self._by_name:
            try:
                self._by_name[name] = self._look_up(name)
            except ValueError as gone:
                raise ActorDiedError from gone
        return self._by_name[name]


def keep_proxy_handles(wait_for_turn: WaitForTurn) -> None:
    """Keeps the handles of all proxies of this process.

    Args:
        wait_for_turn: as in `_ProxyHandles`.
    """
    handles = _ProxyHandles(partial(ray.get_actor, namespace=SERVE_NAMESPACE), wait_for_turn)

    def kept(self: StreamingHTTPRequest) -> Callable[[RequestMetadata], Awaitable[bytes]]:
        if self._receive_asgi_messages is None:
            assert self._proxy_actor_name is not None
            self._receive_asgi_messages = partial(handles.receive_asgi_messages, self._proxy_actor_name)
        return self._receive_asgi_messages

    StreamingHTTPRequest.receive_asgi_messages = property(kept)  # type: ignore[method-assign,assignment]
