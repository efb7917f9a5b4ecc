"""Ingress replicas on the port of the service, with Serve's own server."""

import asyncio
from types import SimpleNamespace
from typing import Any, ClassVar

import httpx
import pytest
import ray
from ray.serve._private import replica
from ray.serve.config import HTTPOptions
from starlette.responses import PlainTextResponse

from deployments.upstream.ray_serve.direct_ingress import PORT_LABEL, listen_on_own_port, own_port
from service.startup.config import free_port

PATCHED = (
    "start_asgi_http_server",
    "RAY_SERVE_ENABLE_DIRECT_INGRESS",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S",
    "ProxyLocation",
)


@pytest.fixture
def labels(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Of the node; Serve's replicas are as they were after the test."""
    found: dict[str, str] = {}
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_labels=lambda: found))
    for name in PATCHED:
        monkeypatch.setattr(replica, name, getattr(replica, name))
    start = "_maybe_start_direct_ingress_servers"
    monkeypatch.setattr(Replica, start, getattr(Replica, start))
    monkeypatch.setattr(replica, "Replica", Replica)
    return found


class Controller:
    """Serve's, of which a replica asks more than ports."""

    answers: ClassVar = {"host": "127.0.0.1"}


class Replica:
    """Serve's, as it asks for its port."""

    def __init__(self) -> None:
        self._controller_handle: Any = Controller()

    async def _maybe_start_direct_ingress_servers(self) -> None:
        controller = self._controller_handle
        self.port = await controller.allocate_replica_port.remote("node", "replica", "HTTP")
        await controller.release_replica_port.remote("node", "replica", self.port, "HTTP", block_port=True)
        self.options = controller.answers

    async def start(self) -> object:
        await self._maybe_start_direct_ingress_servers()
        return self._controller_handle


def test_a_replica_takes_the_port_of_the_service_and_none_of_the_controllers(labels: dict[str, str]) -> None:
    labels[PORT_LABEL] = "8000"
    listen_on_own_port()
    asking = Replica()
    controller = asyncio.run(asking.start())
    assert (asking.port, asking.options, type(controller)) == (8000, Controller.answers, Controller)


async def answers_of_two_replicas(service_port: int) -> set[str]:
    """Serve starts a server for each of two replicas."""
    loop, servers = asyncio.get_running_loop(), []
    for name in ("one", "two"):
        options = HTTPOptions(host="127.0.0.1", port=service_port)
        start = replica.start_asgi_http_server  # type: ignore[attr-defined]
        servers.append(await start(PlainTextResponse(name), options, event_loop=loop, enable_so_reuseport=False))
    answers = set()
    for _ in range(200):
        async with httpx.AsyncClient() as client:
            answers.add((await client.get(f"http://127.0.0.1:{service_port}/")).text)
        if len(answers) == 2:
            break
    for task, server in servers:
        server.should_exit = True
        await task
    return answers


def test_all_replicas_of_the_machine_listen_on_the_port_of_the_service(labels: dict[str, str]) -> None:
    port = free_port()
    labels[PORT_LABEL] = str(port)
    listen_on_own_port()
    assert asyncio.run(answers_of_two_replicas(port)) == {"one", "two"}


def test_where_a_proxy_listens_serve_chooses_the_ports(labels: dict[str, str]) -> None:
    before = [getattr(replica, name) for name in PATCHED]
    listen_on_own_port()
    assert (own_port(), [getattr(replica, name) for name in PATCHED]) == (None, before)
    labels["another"] = "label"
    assert own_port() is None


def test_without_ray_there_is_no_port() -> None:
    assert own_port() is None
