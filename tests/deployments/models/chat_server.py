"""A server of OpenAI's chat completions on a socket of loopback, which answers as a test says."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Answer:
    """What is sent for one request."""

    status: int = 200
    body: Any = None
    headers: dict[str, str] = field(default_factory=dict)
    closes: bool = False
    """Closes the connection in place of an answer."""
    waits_for: threading.Event | None = None
    """Is sent when this is set."""


@dataclass
class ChatServer:
    """Its requests, and how many of them were under way at once."""

    url: str
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    under_way: int = 0
    most_under_way: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


def said(content: str | None, **fields: Any) -> Answer:
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": content, **fields}}
    usage = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
    return Answer(body={"id": "1", "object": "chat.completion", "choices": [choice], "usage": usage})


@contextmanager
def chat_server(answer: Callable[[int, dict[str, Any]], Answer]) -> Iterator[ChatServer]:
    """Args: `answer` gets the number of a request, from 0, and its body."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))) or "{}")
            with server.lock:
                number = len(server.requests)
                server.requests.append({"path": self.path, **body})
                server.headers.append({name.lower(): value for name, value in self.headers.items()})
                server.under_way += 1
                server.most_under_way = max(server.most_under_way, server.under_way)
            self.send(answer(number, body))

        def do_GET(self) -> None:
            self.do_POST()

        def send(self, given: Answer) -> None:
            if given.waits_for is not None:
                given.waits_for.wait(60)
            with server.lock:
                server.under_way -= 1
            if given.closes:
                self.close_connection = True
                return
            sent = given.body if isinstance(given.body, bytes) else json.dumps(given.body).encode()
            self.send_response(given.status)
            for name, value in {"content-length": str(len(sent)), **given.headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(sent)

        def log_message(self, format: str, *args: Any) -> None:
            """Says nothing."""

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    server = ChatServer(f"http://127.0.0.1:{http.server_port}/v1")
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
        thread.join()
