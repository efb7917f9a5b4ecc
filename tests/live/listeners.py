"""The TCP ports that the processes of a service listen on, and what they answer to who has no token."""

import http.client
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any

import grpc
import psutil

ANSWER_TIMEOUT_S = 30.0
METHODS = (
    "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo",
    "/ray.rpc.NodeManagerService/GetNodeStats",
    "/ray.rpc.ObjectManagerService/Pull",
    "/ray.rpc.CoreWorkerService/GetCoreWorkerStats",
    "/ray.rpc.ReporterService/GetTraceback",
    "/ray.serve.ASGIService/HandleRequestWithRejection",
)
"""One of each server of Ray and Serve."""
HEALTHY = "success"
"""The whole body of Ray's health checks, which everybody may ask for."""
PATHS = ("/", "/metrics", "/api/local_raylet_healthz", "/get_or_create_runtime_env")


@dataclass(frozen=True, slots=True)
class Listener:
    """One address that a process listens on."""

    process: str
    """The begin of its command line."""
    address: str
    port: int

    @property
    def is_on_loopback(self) -> bool:
        return ip_address(self.address).is_loopback


@dataclass(frozen=True, slots=True)
class Answers:
    """What a caller without a token gets."""

    grpc: dict[str, str]
    """The status by method; no entry where nobody speaks gRPC."""
    http: dict[str, tuple[int, str]]
    """Status and the begin of the body by path; no entry where nobody speaks HTTP."""

    @property
    def refuses(self) -> bool:
        """Whether some call is refused for the lack of a token, and none does anything."""
        statuses = set(self.grpc.values())
        codes = {code for code, text in self.http.values() if text != HEALTHY}
        if statuses:
            return "UNAUTHENTICATED" in statuses and statuses <= {"UNAUTHENTICATED", "UNIMPLEMENTED"}
        return bool(codes & {401, 403}) and codes <= {401, 403, 404, 405}

    @property
    def has_only_metrics(self) -> bool:
        """Whether it answers nothing but numbers for Prometheus."""
        texts = [text for code, text in self.http.values() if code == http.client.OK]
        return not self.grpc and bool(texts) and all(text.startswith("# HELP") for text in texts)


def listeners() -> Iterator[Listener]:
    """Of this process and all that it has started."""
    found = set()
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        with suppress(psutil.Error):
            name = " ".join(process.cmdline())
            for connection in process.net_connections(kind="inet"):
                if connection.status == psutil.CONN_LISTEN:
                    found.add(Listener(name, connection.laddr.ip, connection.laddr.port))
    yield from sorted(found, key=lambda listener: listener.port)


def answers_of(listener: Listener) -> Answers:
    host = "127.0.0.1" if ip_address(listener.address).is_unspecified else listener.address
    statuses = dict(grpc_statuses(host, listener.port))
    return Answers(statuses, {} if statuses else dict(http_answers(host, listener.port)))


def grpc_statuses(host: str, port: int) -> Iterator[tuple[str, str]]:
    with grpc.insecure_channel(f"{host}:{port}") as channel:
        for method in METHODS:
            call: Any = channel.unary_unary(method)
            try:
                call(b"", timeout=ANSWER_TIMEOUT_S)
            except grpc.RpcError as error:
                code: Any = error.code()
                if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                    return
                yield method, code.name
            else:
                yield method, "OK"


def http_answers(host: str, port: int) -> Iterator[tuple[str, tuple[int, str]]]:
    for path in PATHS:
        connection = http.client.HTTPConnection(host, port, timeout=ANSWER_TIMEOUT_S)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            yield path, (answer.status, answer.read(100).decode(errors="replace"))
        except (OSError, http.client.HTTPException):
            return
        finally:
            connection.close()
