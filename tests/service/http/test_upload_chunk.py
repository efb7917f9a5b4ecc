"""Chunks of weight uploads: what their headers say, and that their bytes are checked against it."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Sequence

import pytest

from deployments.policy.failures import ChunkDamaged
from service.http import upload_chunk
from service.http.upload_chunk import _UploadChunk, checked_parts, chunk_of
from service.problems import RequestProblem
from tests.virtual_time import runs

WHOLE = _UploadChunk(weights_digest=None, is_zstd=False)


async def stream(datas: Sequence[bytes]) -> AsyncIterator[bytes]:
    for data in datas:
        yield data


@runs
async def parts(chunk: _UploadChunk, *datas: bytes) -> list[tuple[int, bytes]]:
    return [part async for part in checked_parts(chunk, stream(datas))]


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def ranged(first: int, end: int, total: int | None = None) -> _UploadChunk:
    return _UploadChunk(None, False, first, end, total)


# Headers


@pytest.mark.parametrize("value", ["", "a" * 63, "a" * 65, "A" * 64, "g" * 64, f"sha-256=:{'a' * 64}:"])
def test_a_digest_of_another_form_is_refused(value: str) -> None:
    with pytest.raises(RequestProblem) as raised:
        chunk_of({"weights-digest": value})
    [error] = raised.value.problem.errors
    says = f"weights-digest {value!r} is not 64 hexadecimal digits in lower case"
    assert (raised.value.problem.status, error.message) == (400, says)


# Bytes


def test_a_body_comes_in_parts_with_their_offsets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload_chunk, "FORWARDED_BYTES", 4)
    assert parts(WHOLE, b"abc", b"def", b"g") == [(0, b"abcdef"), (6, b"g")]
    assert parts(ranged(10, 17), b"abc", b"def", b"g") == [(10, b"abcdef"), (16, b"g")]
    assert parts(WHOLE, b"abcd") == [(0, b"abcd"), (4, b"")]


def test_an_empty_body_is_one_empty_part() -> None:
    assert parts(WHOLE) == [(0, b"")]


def test_a_body_is_refused_once_it_is_over_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload_chunk, "LARGEST_BODY_BYTES", 10)
    assert parts(WHOLE, b"12345", b"67890") == [(0, b"1234567890")]
    for chunk in (WHOLE, ranged(100, 111)):
        with pytest.raises(RequestProblem) as raised:
            parts(chunk, b"12345", b"67890", b"1")
        problem = raised.value.problem
        assert (problem.status, problem.type) == (413, "urn:rollout:problem:body-too-large")
        assert problem.errors[0].message == (
            "it has more than 10 bytes; send it in chunks with Content-Range, as the client does"
        )


@pytest.mark.parametrize(("end", "forwarded"), [(6, 4), (8, 8), (20, 12)])
def test_a_body_not_as_long_as_its_range_is_damaged(monkeypatch: pytest.MonkeyPatch, end: int, forwarded: int) -> None:
    monkeypatch.setattr(upload_chunk, "FORWARDED_BYTES", 4)
    got = list[bytes]()

    async def collect() -> None:
        async for _, part in checked_parts(ranged(0, end), stream([b"0123", b"4567", b"8901"])):
            got.append(part)

    with pytest.raises(ChunkDamaged) as raised:
        asyncio.run(collect())
    [problem] = raised.value.problems
    assert (problem.field, len(b"".join(got))) == ("content-range", forwarded)
