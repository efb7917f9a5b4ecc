"""Reads the bodies of `POST /rollout` and parses large ones beside the event loop. Child's half: `parser_process.py`.

A small body is parsed at once. A large one is parsed in another process: pydantic and every JSON parser hold the
interpreter's lock while they work, so that in a thread of this process they would stop the event loop as well.
"""

import asyncio
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from fastapi import Request

from rollout_client.contract.rollouts import RolloutRequest
from service.admission.admission import AdmittedRequest
from service.http.request_body import JSON, read_body, rollout_media_type
from service.problems import RequestProblem, not_ready
from service.rollout_requests.parser_process import HEADER, LENGTH
from service.rollout_requests.parsing import BodyBounds, joined_request, parsed_body
from service.scoring.parsing import (
    ParsedScoreRequest,
    ScoreBounds,
    joined_score_request,
    parsed_score_request,
)

MOST_BYTES_INLINE = 2**16
"""Parsing this much takes about a millisecond, less than the exchange with another process."""
PROCESSES = 2
"""A body that takes seconds holds up the other large bodies only if there are two of them."""
MOST_BYTES_KEPT = 2**25
"""A process that has parsed a larger body is ended: its allocator keeps the memory."""
PART_BYTES = 2**20
Parsed = TypeVar("Parsed")


class BodyParser:
    """Parses the bodies of one ingress replica. Its processes start when they are first needed."""

    def __init__(self, bounds: BodyBounds) -> None:
        self._bounds = bounds
        self._threads = ThreadPoolExecutor(PROCESSES, thread_name_prefix="parser")
        self._of_thread = threading.local()

    def start(self) -> None:
        """Starts one process now: the first large body finds it ready."""
        self._threads.submit(self._process)

    async def parse(self, body: bytes | bytearray, media_type: str) -> RolloutRequest:
        """Empties a large body.

        Raises `RequestProblem`: 400 or 422, the problems of the body; 503 if its process died.
        """
        if len(body) <= MOST_BYTES_INLINE:
            return parsed_body(body, media_type)
        loop = asyncio.get_running_loop()
        parse = partial(self._parse_elsewhere, body, media_type, self._bounds, joined_request)
        return await loop.run_in_executor(self._threads, parse)

    async def parse_score_request(self, body: bytes | bytearray, bounds: ScoreBounds) -> ParsedScoreRequest:
        """Parses the body of a `POST /score`. Raises what `parse` raises."""
        if len(body) <= MOST_BYTES_INLINE:
            return parsed_score_request(body, bounds)
        loop = asyncio.get_running_loop()
        parse = partial(self._parse_elsewhere, body, JSON, bounds, joined_score_request)
        return await loop.run_in_executor(self._threads, parse)

    def _parse_elsewhere(
        self,
        body: bytes | bytearray,
        media_type: str,
        bounds: BodyBounds | ScoreBounds,
        join: Callable[[Any, Sequence[bytes]], Parsed],
    ) -> Parsed:
        process = self._process()
        try:
            first, rest = process.parse(body, media_type, bounds)
        except OSError as error:
            self._end_process()
            raise not_ready("The process that parses request bodies died, possibly out of memory") from error
        finally:
            if len(body) > MOST_BYTES_KEPT:
                self._end_process()
        request = join(first, rest)
        if isinstance(body, bytearray):
            # Here and not where the last reference is dropped: freeing 256 MB takes 20 ms.
            body.clear()
        return request

    def _process(self) -> "ParserProcess":
        """The process of the calling thread."""
        process: ParserProcess | None = getattr(self._of_thread, "process", None)
        if process is None:
            process = self._of_thread.process = ParserProcess()
        return process

    def _end_process(self) -> None:
        process: ParserProcess | None = self._of_thread.__dict__.pop("process", None)
        if process is not None:
            process.end()

    def close(self) -> None:
        """Ends all processes, when they have parsed their bodies."""
        barrier = threading.Barrier(PROCESSES)
        ends = [self._threads.submit(self._end_after, barrier) for _ in range(PROCESSES)]
        for end in ends:
            end.result()
        self._threads.shutdown()

    def _end_after(self, barrier: threading.Barrier) -> None:
        # Each thread must take one of these calls.
        barrier.wait()
        self._end_process()


class ParserProcess:
    """One process. Every method raises `OSError` if it has died."""

    def __init__(self) -> None:
        # Ray gives its workers a search path that their environment does not have.
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-m", "service.rollout_requests.parser_process"]
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._to_child, self._from_child = self._process.stdin.fileno(), self._process.stdout.fileno()

    def parse(
        self, body: bytes | bytearray, media_type: str, bounds: BodyBounds | ScoreBounds
    ) -> tuple[Any, Sequence[bytes]]:
        """The first frame of the answer, unpickled, and the others.

        Raises `RequestProblem` with the problems of the body.
        """
        parameters = pickle.dumps((media_type, bounds))
        self._write(HEADER.pack(len(parameters), len(body)) + parameters)
        self._write(body)
        frames = self._frames()
        first = pickle.loads(next(frames))
        rest = tuple(frames)
        if isinstance(first, RequestProblem):
            raise first
        return first, rest

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _write(self, data: bytes | bytearray) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._to_child, view[:PART_BYTES]) :]

    def _frames(self) -> Iterator[bytes]:
        while length := LENGTH.unpack(self._read(LENGTH.size))[0]:
            yield self._read(length)

    def _read(self, length: int) -> bytes:
        parts = list[bytes]()
        while length > 0:
            part = os.read(self._from_child, min(length, PART_BYTES))
            if not part:
                raise BrokenPipeError("The process has ended.")
            parts.append(part)
            length -= len(part)
        return b"".join(parts)


@dataclass(frozen=True, slots=True)
class ReceivedRequest:
    """A request and the size of its decompressed body."""

    request: RolloutRequest
    body_bytes: int


async def read_rollout_request(
    request: Request, most_bytes: int, parser: BodyParser, admitted: AdmittedRequest
) -> ReceivedRequest:
    """Reads a body of at most `most_bytes`, and parses it.

    The body is held by `admitted` before it is read, and its rollouts before anything is done for them.

    Raises:
        RequestProblem: 400, 408, 413, 415 or 422, a problem of the body; 429 if it cannot be admitted now;
            503, the process that parses it died.
    """
    media_type = rollout_media_type(request.headers)
    body = await read_body(request, most_bytes, hold=admitted.hold_body)
    body_bytes = len(body)
    parsed = await parser.parse(body, media_type)
    admitted.hold_rollouts(parsed)
    return ReceivedRequest(parsed, body_bytes)
