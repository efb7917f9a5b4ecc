"""Ingress replicas on the port of the service, with Serve's own server."""

import asyncio
from types import SimpleNamespace

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
    return found


async def answers_of_two_replicas(service_port: int, given_ports: list[int]) -> set[str]:
    """Serve starts a server for each of two replicas, with a port that it has chosen."""
    loop, servers = asyncio.get_running_loop(), []
    for name, port in zip(("one", "two"), given_ports, strict=True):
        options = HTTPOptions(host="127.0.0.1", port=port)
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
    assert asyncio.run(answers_of_two_replicas(port, [free_port(), free_port()])) == {"one", "two"}


def test_where_a_proxy_listens_serve_chooses_the_ports(labels: dict[str, str]) -> None:
    before = [getattr(replica, name) for name in PATCHED]
    listen_on_own_port()
    assert (own_port(), [getattr(replica, name) for name in PATCHED]) == (None, before)
    labels["another"] = "label"
    assert own_port() is None


def test_without_ray_there_is_no_port() -> None:
    assert own_port() is None
