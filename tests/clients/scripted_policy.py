"""A stand-in for `/policy` of the service, over real sockets: takes chunks as the contract says, or breaks on cue."""

import json
import re
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from tempfile import NamedTemporaryFile
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import zstandard
from pydantic import BaseModel
from pydantic_core import to_json

from rollout_client.contract.policy import (
    NamedPolicyState,
    PolicyLayout,
    PolicyState,
    PolicyUpdate,
    TensorLayout,
    UploadState,
    VersionInfo,
)
from rollout_client.weights.checksum import file_digest

RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")
CREATED_AT = datetime(2026, 1, 1, tzinfo=UTC)
CUT = "cut"
"""Closes the connection without an answer, before anything of the body counts."""
CUT_AFTER = "cut after"
"""Takes the chunk, then closes the connection without an answer."""
FORGET = "forget"
"""Loses everything that has arrived, and the connection."""
DAMAGED = "damaged"
"""Finds that what has arrived is not what was sent, and drops all of it."""


def problem(status: int, type_: str = "about:blank") -> dict[str, Any]:
    return {"type": type_, "title": "Scripted", "status": status, "detail": ""}


@dataclass
class Put:
    """One `PUT /policy/versions/{version}` as it arrived."""

    version: int
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes


@dataclass
class ScriptedPolicy:
    """Holds version 0; `script` says what becomes of the next requests that bring a chunk, `None` being all well."""

    layout: dict[str, tuple[str, list[int]]] = field(default_factory=dict)
    max_lora_rank: int | None = None
    base: int | None = None
    warnings: list[str] = field(default_factory=list)
    """These are in every update."""
    url: str = ""
    puts: list[Put] = field(default_factory=list)
    rollbacks: list[tuple[dict[str, str], dict[str, int]]] = field(default_factory=list)
    """Query and body of each `POST /policy/rollback`."""
    asked: list[str] = field(default_factory=list)
    script: deque[str | tuple[int, dict[str, str]] | None] = field(default_factory=deque)
    versions: dict[int, bytes] = field(default_factory=lambda: {0: b""})
    uploads: dict[int, bytes] = field(default_factory=dict)
    checksum_of: Callable[[int, bytes], str | None] = lambda _version, _content: None
    polls: deque[int] = field(default_factory=deque)
    """Which version is current at the next `GET /policy`, one each."""
    named: list[NamedPolicyState] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    """The paths of `DELETE`."""
    updating: deque[int] = field(default_factory=deque)
    """Which version is on its way at the next `GET /policy`, one each."""

    @property
    def ranges(self) -> list[str]:
        return [put.headers["content-range"] for put in self.puts]

    def content(self, version: int) -> bytes:
        """The safetensors file that arrived as `version`, decompressed."""
        content = self.versions[version]
        is_packed = content.startswith(zstandard.FRAME_HEADER)
        return zstandard.ZstdDecompressor().decompressobj().decompress(content) if is_packed else content

    def state(self) -> PolicyState:
        current = self.polls.popleft() if self.polls else max(self.versions)
        infos = [
            VersionInfo(
                version=version, kind="full", created_at=CREATED_AT, checksum=self.checksum_of(version, content)
            )
            for version, content in self.versions.items()
        ]
        return PolicyState(
            current=current,
            versions=infos,
            replicas=[],
            updating_to=self.updating.popleft() if self.updating else None,
            next_version=max(self.versions) + 1,
            named=self.named,
        )

    def take(self, put: Put) -> tuple[int, BaseModel | dict[str, Any]]:
        """The status and the answer to a chunk, as the contract defines them."""
        found = RANGE.fullmatch(put.headers["content-range"])
        assert found, put.headers
        first, last, total = int(found[1]), int(found[2]), found[3]
        assert len(put.body) == last - first + 1
        if put.version in self.versions:
            assert put.headers["weights-digest"] == digest_of(self.content(put.version))
            return 200, self.update(put.version)
        arrived = self.uploads.get(put.version, b"")
        if first > len(arrived):
            return 409, problem(409, "urn:rollout:problem:chunk-misplaced")
        arrived = arrived[:first] + put.body
        self.uploads[put.version] = arrived
        if total == "*" or len(arrived) < int(total):
            return 202, UploadState(version=put.version, received_bytes=len(arrived))
        self.versions[put.version] = self.uploads.pop(put.version)
        assert put.headers["weights-digest"] == digest_of(self.content(put.version))
        return 200, self.update(put.version)

    def update(self, version: int) -> PolicyUpdate:
        checksum = self.checksum_of(version, self.versions[version])
        return PolicyUpdate(version=version, checksum=checksum, replicas=[], base=self.base, warnings=self.warnings)


def digest_of(content: bytes) -> str:
    """The `weights_digest` of a safetensors file with this content."""
    with NamedTemporaryFile() as file:
        file.write(content)
        file.flush()
        return file_digest(file.name)


def layout_of(tensors: dict[str, tuple[str, list[int]]]) -> PolicyLayout:
    return PolicyLayout(tensors={key: TensorLayout(dtype=dtype, shape=size) for key, (dtype, size) in tensors.items()})


def handler(policy: ScriptedPolicy) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        disable_nagle_algorithm = True
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            policy.asked.append(self.path)
            place = urlsplit(self.path)
            if place.path == "/policy/layout":
                layout = layout_of(policy.layout)
                self.answer(200, layout.model_copy(update={"max_lora_rank": policy.max_lora_rank}))
            elif place.path == "/policy":
                state = policy.state()
                if state.current >= int(dict(parse_qsl(place.query)).get("min_version", 0)):
                    self.answer(200, state)
                else:
                    self.answer(409, problem(409, "urn:rollout:problem:policy-not-current"))
            elif (version := int(place.path.split("/")[3])) in policy.uploads:
                self.answer(200, UploadState(version=version, received_bytes=len(policy.uploads[version])))
            else:
                self.answer(404, problem(404))

        def do_POST(self) -> None:
            place = urlsplit(self.path)
            assert place.path == "/policy/rollback"
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            policy.rollbacks.append((dict(parse_qsl(place.query)), body))
            version = body.get("version", max(policy.versions, default=0) + 1)
            policy.versions[version] = policy.versions[body["to"]]
            self.answer(200, policy.update(version))

        def do_DELETE(self) -> None:
            policy.dropped.append(self.path)
            self.send_response(204)
            self.end_headers()

        def do_PUT(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            place = urlsplit(self.path)
            headers = {name.lower(): value for name, value in self.headers.items()}
            put = Put(int(place.path.split("/")[3]), dict(parse_qsl(place.query)), headers, body)
            policy.puts.append(put)
            step = policy.script.popleft() if policy.script else None
            if isinstance(step, tuple):
                self.answer(step[0], problem(step[0]) | step[1])
            elif step == CUT:
                self.hang_up()
            elif step == DAMAGED:
                policy.uploads.clear()
                self.answer(400, problem(400, "urn:rollout:problem:chunk-damaged"))
            elif headers["content-type"] == "application/json":
                policy.versions[put.version] = body
                self.answer(200, policy.update(put.version))
            else:
                answer = policy.take(put)
                if step == FORGET:
                    policy.uploads.clear()
                if step is None:
                    self.answer(*answer)
                else:
                    self.hang_up()

        def hang_up(self) -> None:
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True

        def answer(self, status: int, answer: BaseModel | dict[str, Any]) -> None:
            body = to_json(answer)
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_arguments: object) -> None:
            pass

    return Handler


@contextmanager
def serving(policy: ScriptedPolicy) -> Iterator[ScriptedPolicy]:
    """Serves `policy` on a free port of loopback, for the length of a block."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler(policy)) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        policy.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield policy
        finally:
            server.shutdown()
