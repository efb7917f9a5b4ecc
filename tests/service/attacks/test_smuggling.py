"""Request smuggling: HAProxy, configured as Ray Serve configures it, and the service must agree where a request ends.

If they did not, the end of one caller's request would become the beginning of another caller's, with the latter's key.
"""

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from operator import methodcaller
from pathlib import Path
from typing import Any

import pytest
from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig, ServerConfig, get_haproxy_binary
from ray.serve.config import HTTPOptions

from service.startup.config import free_port
from tests.clients.scripted_service import served
from tests.service.keyed_http import KeyedHttp

pytestmark = pytest.mark.slow
SMUGGLED = b"GET /smuggled HTTP/1.1\r\nhost: x\r\n\r\n"
ANSWERED_WITHIN_S = 40.0
SAYS_NO_MORE_AFTER_S = 1.0


class SeenRequests:
    """The application, and the request lines and keys that reach it."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.seen: list[tuple[str, str, bytes]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope.get("path") == "/-/healthz":
            # In a service Serve's replica answers HAProxy's checks.
            scope = {**scope, "path": "/healthz"}
        elif scope["type"] == "http":
            headers = dict(scope["headers"])
            self.seen.append((scope["method"], scope["path"], headers.get(b"authorization", b"")))
        await self.app(scope, receive, send)


@contextmanager
def haproxy_before(url: str, folder: Path) -> Iterator[int]:
    """HAProxy with Ray Serve's own configuration before the server at `url`; yields its port."""
    port = free_port()
    config = HAProxyConfig(
        http_options=HTTPOptions(host="127.0.0.1", port=port),
        socket_path=str(folder / "admin.sock"),
        server_state_base=str(folder),
        server_state_file=str(folder / "state"),
        metrics_port=free_port(),
        stats_port=free_port(),
    )
    server = ServerConfig("replica", "127.0.0.1", int(url.rpartition(":")[2]))
    backend = BackendConfig("rollout", "/", servers=[server], app_name="rollout")
    path = folder / "haproxy.cfg"
    methodcaller("_generate_config_file_internal")(HAProxyApi(config, {"rollout": backend}, str(path)))
    with subprocess.Popen([get_haproxy_binary(), "-db", "-f", str(path)], stderr=subprocess.PIPE) as haproxy:
        try:
            wait_for(port, haproxy)
            yield port
        finally:
            haproxy.kill()


def wait_for(port: int, haproxy: "subprocess.Popen[bytes]") -> None:
    until = time.monotonic() + ANSWERED_WITHIN_S
    while time.monotonic() < until:
        if b" 200 " in answer_of(port, b"GET /healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")[:16]:
            return
        time.sleep(0.05)
    haproxy.kill()
    pytest.fail(f"HAProxy does not answer: {haproxy.stderr.read().decode() if haproxy.stderr else ''}")


def answer_of(port: int, sent: bytes) -> bytes:
    """What comes back until the other side closes, or says nothing more for a while after it has begun."""
    received = b""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=ANSWERED_WITHIN_S) as connection:
            connection.sendall(sent)
            while data := connection.recv(65536):
                received += data
                connection.settimeout(SAYS_NO_MORE_AFTER_S)
    except OSError:
        pass
    return received


def post(headers: bytes, body: bytes) -> bytes:
    return b"POST /rollout HTTP/1.1\r\nhost: x\r\n" + headers + b"\r\n\r\n" + body


def chunked(body: bytes) -> bytes:
    return b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)


LENGTH = b"content-length: %d" % len(SMUGGLED)
ATTACKS = {
    "length before chunks": post(b"content-length: 6\r\ntransfer-encoding: chunked", b"0\r\n\r\n" + SMUGGLED),
    "chunks before length": post(b"transfer-encoding: chunked\r\ncontent-length: 4", chunked(SMUGGLED)),
    "two lengths": post(b"content-length: 0\r\n" + LENGTH, SMUGGLED),
    "two lengths in one": post(b"content-length: 0, %d" % len(SMUGGLED), SMUGGLED),
    "signed length": post(b"content-length: +0", SMUGGLED),
    "hexadecimal length": post(b"content-length: 0x0", SMUGGLED),
    "space before the colon": post(b"content-length: 5\r\ntransfer-encoding : chunked", b"0\r\n\r\n" + SMUGGLED),
    "tab in the encoding": post(b"content-length: 5\r\ntransfer-encoding:\tchunked", b"0\r\n\r\n" + SMUGGLED),
    "vertical tab in the encoding": post(
        b"content-length: 5\r\ntransfer-encoding:\x0bchunked", b"0\r\n\r\n" + SMUGGLED
    ),
    "two encodings": post(b"transfer-encoding: chunked\r\ntransfer-encoding: identity", b"0\r\n\r\n" + SMUGGLED),
    "unknown encoding": post(b"transfer-encoding: xchunked\r\ncontent-length: 5", b"0\r\n\r\n" + SMUGGLED),
    "folded header": post(b"x: 1\r\n transfer-encoding: chunked\r\ncontent-length: 5", b"0\r\n\r\n" + SMUGGLED),
    "line feeds alone": post(b"x: 1\ntransfer-encoding: chunked\r\ncontent-length: 5", b"0\r\n\r\n" + SMUGGLED),
    "carriage return": post(b"x: 1\rtransfer-encoding: chunked\r\ncontent-length: 5", b"0\r\n\r\n" + SMUGGLED),
    "null in a value": post(b"x: 1\x00\r\ncontent-length: 0", SMUGGLED),
    "chunk extension with a line feed": post(b"transfer-encoding: chunked", b"0;x\n\r\n\r\n" + SMUGGLED),
    "chunk size too large": post(b"transfer-encoding: chunked", b"fffffffffffffffff0\r\n" + SMUGGLED),
    "underscored name": post(b"content_length: 0\r\n" + LENGTH, SMUGGLED),
    "request line in a path": b"GET /healthz\r\nx: y HTTP/1.1\r\nhost: x\r\n\r\n" + SMUGGLED,
    "upgrade to h2c": b"GET /healthz HTTP/1.1\r\nhost: x\r\nconnection: upgrade, http2-settings\r\nupgrade: h2c\r\n"
    b"http2-settings: AAMAAABkAARAAAAAAAIAAAAA\r\n\r\n",
}
EXPECTED = {("GET", "/policy"), ("POST", "/rollout"), ("GET", "/healthz"), ("GET", "/smuggled")}


@pytest.fixture(scope="module")
def proxied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, KeyedHttp, SeenRequests]]:
    folder = tmp_path_factory.mktemp("haproxy")
    keyed = KeyedHttp(folder)
    seen = SeenRequests(keyed.service.app)
    keyed.service.app = seen  # type: ignore[assignment]
    short = Path("/tmp") / f"haproxy-{free_port()}"
    short.mkdir()
    try:
        with served(keyed.service.app) as url, haproxy_before(url, short) as port:
            yield port, keyed, seen
    finally:
        shutil.rmtree(short)


@pytest.mark.parametrize("name", ATTACKS)
def test_the_end_of_a_request_never_begins_another_callers(
    proxied: tuple[int, KeyedHttp, SeenRequests], name: str
) -> None:
    port, keyed, seen = proxied
    seen.seen.clear()
    attacked = answer_of(port, ATTACKS[name])
    mine = b"authorization: Bearer %s\r\n" % keyed.keys["read"].encode()
    for _ in range(3):
        answer = answer_of(port, b"GET /policy HTTP/1.1\r\nhost: x\r\n" + mine + b"connection: close\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200")
    with_my_key = [(method, path) for method, path, key in seen.seen if key]
    assert with_my_key == [("GET", "/policy")] * 3
    smuggled = [path for _, path, _ in seen.seen if path == "/smuggled"]
    # What HAProxy read as a request of the attacker itself has had an answer of its own.
    assert len(smuggled) <= attacked.count(b"HTTP/1.1 404")
    assert all(
        line in {("POST", "/rollout", b""), ("GET", "/healthz", b""), ("GET", "/smuggled", b"")} or line[2]
        for line in seen.seen
    )
