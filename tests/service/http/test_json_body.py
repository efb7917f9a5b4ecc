"""JSON bodies of the policy routes: what is read, and the status of what is not."""

import asyncio
import gzip
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fastapi import Request

from rollout_client.contract.policy import CheckpointSource
from service.http.request_body import read_json_body
from service.problems import RequestProblem

BODY = b'{"checkpoint": "/a"}'
ADVICE = "send less"


def read(*datas: bytes, most_bytes: int = 1000, **headers: str) -> CheckpointSource:
    async def receive() -> AsyncIterator[dict[str, object]]:
        for data in datas:
            yield {"type": "http.request", "body": data, "more_body": True}
        yield {"type": "http.request", "body": b"", "more_body": False}

    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    request = Request({"type": "http", "headers": raw}, receive().__anext__)
    return asyncio.run(read_json_body(request, CheckpointSource, most_bytes, ADVICE))


@pytest.mark.parametrize("content_type", ["application/json", "application/json; charset=utf-8", ""])
def test_a_json_body_is_read_in_chunks(content_type: str) -> None:
    assert read(BODY[:7], BODY[7:], content_type=content_type) == CheckpointSource(checkpoint="/a")


def test_a_compressed_body_is_read() -> None:
    assert read(gzip.compress(BODY), content_encoding="gzip") == CheckpointSource(checkpoint="/a")


def test_a_body_may_have_exactly_the_bound() -> None:
    assert read(BODY, most_bytes=len(BODY)) == CheckpointSource(checkpoint="/a")


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (b"{", {}, 400),
        (BODY, {"content_encoding": "gzip"}, 400),
        (BODY + b" " * 1000, {}, 413),
        (BODY, {"content_encoding": "br"}, 415),
        (BODY, {"content_type": "text/csv"}, 415),
        (b"{}", {}, 422),
        (b'{"checkpoint": "/a", "x": 1}', {}, 422),
    ],
)
def test_each_fault_of_a_body_has_its_status(body: bytes, headers: dict[str, Any], status: int) -> None:
    with pytest.raises(RequestProblem) as raised:
        read(body, **headers)
    assert raised.value.problem.status == status


def test_a_body_over_the_bound_is_told_what_to_do() -> None:
    with pytest.raises(RequestProblem, match=r"^body: it is larger than the limit of 19 bytes; send less\.$"):
        read(BODY, most_bytes=len(BODY) - 1)
