"""HTTP requests as a server hands them to the application, without a server."""

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import Request


def http_request(chunks: Sequence[bytes], headers: Mapping[str, str]) -> Request:
    """A request whose body arrives in `chunks`; reading past its end is an error."""
    waiting = [
        {"type": "http.request", "body": chunk, "more_body": index < len(chunks) - 1}
        for index, chunk in enumerate(chunks)
    ]

    async def receive() -> Any:
        return waiting.pop(0)

    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    return Request({"type": "http", "method": "POST", "path": "/rollout", "headers": raw}, receive)
