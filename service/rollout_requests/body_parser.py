"""Parses the bodies of `POST /rollout`, `/score` and `/rollouts/logprobs`, large ones beside the event loop.

A small body is parsed at once. A large one is parsed in another process: pydantic and every JSON parser hold the
interpreter's lock while they work, so that in a thread of this process they would stop the event loop as well. So
would sending it as a message: the two processes share a file in memory.
"""

import asyncio
import os
import pickle
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, BinaryIO, TypeVar

from fastapi import Request

from deployments.rollout_records.comparison import TrainerReport
from rollout_client.contract.rollouts import RolloutRequest
from rollout_env import TemporaryFailure
from rollout_env.worker_pool import ProcessorTimeExceeded, WorkerPool
from service.admission.admission import AdmittedRequest
from service.http.request_body import read_body, refuse_other_than_json
from service.problems import not_ready
from service.rollout_requests.parsing import (
    BodyBounds,
    ParsedScoreRequest,
    PartsOf,
    ScoreBounds,
    joined_request,
    parse_file,
    parsed_body,
    parsed_reports,
    parsed_score_request,
    prepare_process,
    request_parts,
    score_request_parts,
)

MOST_BYTES_INLINE = 2**16
"""Parsing this much takes about a millisecond, less than the exchange with another process."""
PROCESSES = 2
"""A body that takes seconds holds up the other large bodies only if there are two of them."""
LONGEST_PARSING_S = 600.0
Parsed = TypeVar("Parsed")


class BodyParser:
    """Parses the bodies of one ingress replica. Its processes start when they are first needed."""

    def __init__(self, bounds: BodyBounds) -> None:
        self._bounds = bounds

    @cached_property
    def _processes(self) -> WorkerPool:
        return WorkerPool(PROCESSES, prepare_process, [parse_file.__module__], LONGEST_PARSING_S)

    def start(self) -> None:
        """Starts the processes now: the first large body finds them ready."""
        assert self._processes

    async def parse(self, body: bytes | bytearray) -> RolloutRequest:
        """Empties a large body.

        Raises `RequestProblem`: 400 or 422, the problems of the body; 503 if its process died.
        """
        if len(body) <= MOST_BYTES_INLINE:
            return parsed_body(body)
        return await self._parse_elsewhere(body, partial(request_parts, bounds=self._bounds), joined_request)

    async def parse_score_request(self, body: bytes | bytearray, bounds: ScoreBounds) -> ParsedScoreRequest:
        """Parses the body of a `POST /score`. Raises what `parse` raises."""
        if len(body) <= MOST_BYTES_INLINE:
            return parsed_score_request(body, bounds)
        parts_of = partial(score_request_parts, bounds=bounds)
        return await self._parse_elsewhere(body, parts_of, lambda first, others: replace(first, sequences=[*others]))

    async def parse_reports(self, body: bytes | bytearray) -> list[TrainerReport]:
        """Parses the body of a `POST /rollouts/logprobs`. Raises what `parse` raises."""
        if len(body) <= MOST_BYTES_INLINE:
            return parsed_reports(body)
        return await self._parse_elsewhere(body, parsed_reports, lambda first, others: [first, *others])

    async def _parse_elsewhere(
        self, body: bytes | bytearray, parts_of: PartsOf, join: Callable[[Any, Iterable[Any]], Parsed]
    ) -> Parsed:
        # To the end also if the caller is cancelled: until then the other process may open the file by its number.
        return await asyncio.shield(asyncio.ensure_future(self._parsed(body, parts_of, join)))

    async def _parsed(
        self, body: bytes | bytearray, parts_of: PartsOf, join: Callable[[Any, Iterable[Any]], Parsed]
    ) -> Parsed:
        file = os.fdopen(os.memfd_create("body"), "r+b")
        try:
            await asyncio.to_thread(_move, body, file)
            path = f"/proc/{os.getpid()}/fd/{file.fileno()}"
            await self._processes.run(LONGEST_PARSING_S, parse_file, parts_of, path)
            parts = _parts_in(file)
            return await asyncio.to_thread(lambda: join(next(parts), parts))
        except (TemporaryFailure, ProcessorTimeExceeded) as error:
            raise not_ready("The process that parses request bodies died, possibly out of memory") from error
        finally:
            # Freeing 256 MB takes 20 ms.
            await asyncio.to_thread(file.close)

    def close(self) -> None:
        """Ends the processes."""
        if "_processes" in vars(self):
            self._processes.close()


def _move(body: bytes | bytearray, file: BinaryIO) -> None:
    file.write(body)
    file.flush()
    if isinstance(body, bytearray):
        # Here and not where the last reference is dropped: freeing 256 MB takes 20 ms.
        body.clear()


def _parts_in(file: BinaryIO) -> Iterator[Any]:
    file.seek(0)
    with suppress(EOFError):
        while True:
            yield pickle.load(file)


async def read_rollout_request(
    request: Request, most_bytes: int, parser: BodyParser, admitted: AdmittedRequest
) -> tuple[RolloutRequest, int]:
    """Reads a body of at most `most_bytes`, and parses it. Returns the request and the size of its decompressed body.

    The body is held by `admitted` before it is read, and its rollouts before anything is done for them.

    Raises:
        RequestProblem: 400, 408, 413, 415 or 422, a problem of the body; 429 if it cannot be admitted now;
            503, the process that parses it died.
    """
    refuse_other_than_json(request.headers)
    body = await read_body(request, most_bytes, hold=admitted.hold_body)
    body_bytes = len(body)
    parsed = await parser.parse(body)
    admitted.hold_rollouts(parsed)
    return parsed, body_bytes
