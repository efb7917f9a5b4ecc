"""Reads the bodies of `POST /rollout` and parses large ones beside the event loop. Child's half: `parser_process.py`.

A small body is parsed at once. A large one is parsed in another process: pydantic and every JSON parser hold the
interpreter's lock while they work, so that in a thread of this process they would stop the event loop as well.
"""

import asyncio
import multiprocessing
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from fastapi import Request

from rollout_client.contract.rollouts import RolloutRequest
from service.admission.admission import AdmittedRequest
from service.http.request_body import read_body, rollout_media_type
from service.problems import RequestProblem, not_ready
from service.rollout_requests.parsing import (
    BodyBounds,
    ParsedScoreRequest,
    ScoreBounds,
    joined_request,
    joined_score_request,
    parsed_body,
    parsed_score_request,
    request_parts,
    score_request_parts,
)

MOST_BYTES_INLINE = 2**16
"""Parsing this much takes about a millisecond, less than the exchange with another process."""
PROCESSES = 2
"""A body that takes seconds holds up the other large bodies only if there are two of them."""
MOST_BYTES_KEPT = 2**25
"""A process that has parsed a larger body is ended: its allocator keeps the memory."""
Parsed = TypeVar("Parsed")
PartsOf = Callable[[bytes], Iterable[Any]]
"""Parses a body in the other process. Gives the request in parts, each of which is pickled alone."""


class BodyParser:
    """Parses the bodies of one ingress replica. Its processes start when they are first needed."""

    def __init__(self, bounds: BodyBounds) -> None:
        self._bounds = bounds
        self._threads = ThreadPoolExecutor(PROCESSES, thread_name_prefix="parser")
        self._idle: list[ParserProcess] = []

    def start(self) -> None:
        """Starts one process now: the first large body finds it ready."""
        self._threads.submit(lambda: self._idle.append(ParserProcess()))

    async def parse(self, body: bytes | bytearray, media_type: str) -> RolloutRequest:
        """Empties a large body.

        Raises `RequestProblem`: 400 or 422, the problems of the body; 503 if its process died.
        """
        if len(body) <= MOST_BYTES_INLINE:
            return parsed_body(body, media_type)
        parts_of = partial(request_parts, media_type=media_type, bounds=self._bounds)
        return await self._parse_elsewhere(body, parts_of, joined_request)

    async def parse_score_request(self, body: bytes | bytearray, bounds: ScoreBounds) -> ParsedScoreRequest:
        """Parses the body of a `POST /score`. Raises what `parse` raises."""
        if len(body) <= MOST_BYTES_INLINE:
            return parsed_score_request(body, bounds)
        return await self._parse_elsewhere(body, partial(score_request_parts, bounds=bounds), joined_score_request)

    async def _parse_elsewhere(
        self, body: bytes | bytearray, parts_of: PartsOf, join: Callable[[Any, Iterable[Any]], Parsed]
    ) -> Parsed:
        def parse() -> Parsed:
            request = join(*self._parts(body, parts_of))
            if isinstance(body, bytearray):
                # Here and not where the last reference is dropped: freeing 256 MB takes 20 ms.
                body.clear()
            return request

        return await asyncio.get_running_loop().run_in_executor(self._threads, parse)

    def _parts(self, body: bytes | bytearray, parts_of: PartsOf) -> tuple[Any, Iterable[Any]]:
        process = self._idle.pop() if self._idle else ParserProcess()
        small, is_kept = len(body) <= MOST_BYTES_KEPT, False
        try:
            parsed = process.parse(body, parts_of)
            is_kept = small
            return parsed
        except RequestProblem:
            is_kept = small
            raise
        except (OSError, EOFError) as error:
            raise not_ready("The process that parses request bodies died, possibly out of memory") from error
        finally:
            if is_kept:
                self._idle.append(process)
            else:
                process.end()

    def close(self) -> None:
        """Ends all processes, when they have parsed their bodies."""
        self._threads.shutdown()
        for process in self._idle:
            process.end()


class ParserProcess:
    """One process. Its methods raise `OSError` or `EOFError` if it has died."""

    def __init__(self) -> None:
        # Ray gives its workers a search path that their environment does not have.
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._connection, childs = multiprocessing.Pipe()
        with childs:
            command = [sys.executable, "-m", "service.rollout_requests.parser_process", str(childs.fileno())]
            self._process = subprocess.Popen(command, env=environment, pass_fds=[childs.fileno()])

    def parse(self, body: bytes | bytearray, parts_of: PartsOf) -> tuple[Any, Iterable[Any]]:
        """The first part of the answer, and the others, each unpickled when it is its turn.

        Raises `RequestProblem` with the problems of the body.
        """
        self._connection.send_bytes(pickle.dumps(parts_of))
        self._connection.send_bytes(body)
        first, *rest = iter(self._connection.recv_bytes, b"")
        answer = pickle.loads(first)
        if isinstance(answer, RequestProblem):
            raise answer
        return answer, map(pickle.loads, rest)

    def end(self) -> None:
        self._connection.close()
        self._process.kill()
        self._process.wait()


async def read_rollout_request(
    request: Request, most_bytes: int, parser: BodyParser, admitted: AdmittedRequest
) -> tuple[RolloutRequest, int]:
    """Reads a body of at most `most_bytes`, and parses it. Returns the request and the size of its decompressed body.

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
    return parsed, body_bytes
