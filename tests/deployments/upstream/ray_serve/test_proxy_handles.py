"""Serve's proxies are looked up once, and again when they have died."""

import asyncio
from collections import Counter
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError
from ray.serve._private.common import RequestMetadata, StreamingHTTPRequest

from deployments.upstream.ray_serve.proxy_handles import _ProxyHandles, keep_proxy_handles
from service.http.middlewares import STEPS_PER_ITERATION, request_pacer
from tests import virtual_time

REQUEST: Any = SimpleNamespace(request_id="r")


class ScriptedProxy:
    """A handle of a proxy that knows requests, as Ray gives it."""

    def __init__(self, actor_id: str, bodies: Mapping[str, bytes]) -> None:
        self._actor_id = actor_id
        self._bodies = bodies
        self.is_dead = False
        self.receive_asgi_messages = SimpleNamespace(remote=self._receive)

    async def _receive(self, request: RequestMetadata) -> bytes:
        if self.is_dead:
            raise ActorDiedError
        return self._bodies[request.request_id]


class ScriptedActors:
    def __init__(self, **by_name: ScriptedProxy) -> None:
        self.by_name = by_name
        self.looked_up: list[str] = []

    def look_up(self, name: str) -> ScriptedProxy:
        self.looked_up.append(name)
        if name not in self.by_name:
            raise ValueError(name)
        return self.by_name[name]


def asked(handles: _ProxyHandles, name: str = "a") -> bytes:
    return asyncio.run(handles.receive_asgi_messages(name, REQUEST))


def handles_of_dead_proxy() -> tuple[ScriptedActors, _ProxyHandles]:
    """Handles that knew the proxy `a` when it died."""
    first = ScriptedProxy("1", {"r": b"first"})
    actors = ScriptedActors(a=first)
    handles = _ProxyHandles(actors.look_up, request_pacer().wait_for_turn)
    asked(handles)
    first.is_dead = True
    return actors, handles


def test_a_request_of_a_proxy_that_was_started_again_reaches_it() -> None:
    actors, handles = handles_of_dead_proxy()
    actors.by_name["a"] = ScriptedProxy("2", {"r": b"second"})
    assert [asked(handles), asked(handles)] == [b"second", b"second"]
    assert actors.looked_up == ["a", "a"]


def test_a_request_of_a_dead_proxy_hears_of_its_death() -> None:
    actors, handles = handles_of_dead_proxy()
    with pytest.raises(ActorDiedError):
        asked(handles)
    looked_up = len(actors.looked_up)
    del actors.by_name["a"]
    with pytest.raises(ActorDiedError):
        asked(handles)
    assert len(actors.looked_up) == looked_up + 1, "once more"
    actors.by_name["a"] = ScriptedProxy("2", {})
    with pytest.raises(KeyError):
        asked(handles)


def test_requests_of_serve_share_the_handles(monkeypatch: pytest.MonkeyPatch) -> None:
    actors = ScriptedActors(a=ScriptedProxy("1", {"r": b"of a"}), b=ScriptedProxy("2", {"r": b"of b"}))
    monkeypatch.setattr(
        ray, "get_actor", lambda name, namespace: actors.look_up(name) if namespace == "serve" else None
    )
    # Serve's own property is back after the test.
    monkeypatch.setattr(StreamingHTTPRequest, "receive_asgi_messages", StreamingHTTPRequest.receive_asgi_messages)
    keep_proxy_handles(request_pacer().wait_for_turn)
    requests = [StreamingHTTPRequest({"type": "http"}, proxy_actor_name=name) for name in "aabab"]
    received: list[bytes] = []
    for request in requests:
        message: Any = request.receive_asgi_messages(REQUEST)
        received.append(asyncio.run(message))
    assert (received, actors.looked_up) == ([b"of a", b"of a", b"of b", b"of a", b"of b"], ["a", "b"])


async def test_messages_that_arrive_at_once_are_received_in_turn() -> None:
    received_in: list[int] = []
    arrived = asyncio.Event()

    async def answer(_request: RequestMetadata) -> bytes:
        await arrived.wait()
        return b"body"

    proxy = ScriptedProxy("1", {})
    proxy.receive_asgi_messages = SimpleNamespace(remote=answer)
    handles = _ProxyHandles(ScriptedActors(a=proxy).look_up, request_pacer().wait_for_turn)

    async def receive() -> None:
        assert await handles.receive_asgi_messages("a", REQUEST) == b"body"
        received_in.append(virtual_time.iteration())

    requests = [asyncio.create_task(receive()) for _ in range(100)]
    await asyncio.sleep(0.01)
    arrived.set()
    await asyncio.gather(*requests)
    assert len(received_in) == 100
    assert max(Counter(received_in).values()) <= STEPS_PER_ITERATION
