"""From the headers and the bytes of a `POST /rollout` or `/jobs` to its job.

The headers `Idempotency-Key` and `Prefer` say how it is played and answered; reading them does no I/O.
"""

import asyncio
import re
from hashlib import sha256
from typing import Any

import http_sf
from fastapi import Request
from starlette.datastructures import Headers

from deployments.jobs.failures import JobsNotConfigured
from deployments.jobs.records import JobRequest, OpenedJob
from rollout_client.contract.jobs import HEARTBEAT, IDEMPOTENCY_KEY, PREFER
from rollout_client.contract.problems import FieldProblem
from service.access.keys import Caller
from service.admission.admission import AdmittedRequest
from service.http.request_body import read_body, rollout_media_type
from service.http.streaming import PERIOD_S
from service.jobs.player import compressed_body
from service.jobs.runner import JobRunner
from service.problems import RequestProblem, invalid_request, shown

KEY_FIELD = "header.Idempotency-Key"
BARE_KEY = re.compile(r"[A-Za-z0-9._~-]{1,255}")
"""A key without quotes, which the draft does not allow and many clients send."""
MOST_CHARACTERS = 255
SHORTEST_HEARTBEAT_S = 1.0


def idempotency_key(headers: Headers) -> str | None:
    """The key of a request; `None` without one. A String of RFC 9651, as draft-ietf-httpapi-idempotency-key-header has
    it, or the same key without its quotes.

    Raises:
        RequestProblem: 422, the header is there more than once or has another form.
    """
    given = headers.getlist(IDEMPOTENCY_KEY)
    if not given:
        return None
    if len(given) > 1:
        raise _bad_key("it is there more than once; send it once", ", ".join(given))
    if BARE_KEY.fullmatch(given[0]):
        return given[0]
    try:
        parsed: Any = http_sf.parse(given[0].encode("latin-1"), tltype="item")
        key, parameters = parsed
    except ValueError as error:
        raise _bad_key(f'it is not of the form "KEY": {error}', given[0]) from error
    if not isinstance(key, str) or parameters or not 1 <= len(key) <= MOST_CHARACTERS:
        raise _bad_key(f'it must be of the form "KEY", with 1 to {MOST_CHARACTERS} characters', given[0])
    return key


def required_key(headers: Headers) -> str:
    """As `idempotency_key`; raises `RequestProblem`, 422, for a request without one."""
    key = idempotency_key(headers)
    if key is None:
        raise _bad_key("it is missing; send the one with which the request was posted", None)
    return key


def _bad_key(message: str, value: str | None) -> RequestProblem:
    return invalid_request(FieldProblem(field=KEY_FIELD, message=message, value=shown(value)))


def heartbeat_s(headers: Headers) -> float | None:
    """The silence in seconds after which a stream sends an empty line; `None` if the caller does not ask for it.

    A preference of RFC 7240, the first of its name: `Prefer: heartbeat=15`.
    """
    for preference in ",".join(headers.getlist(PREFER)).split(","):
        name, _, value = preference.partition(";")[0].partition("=")
        if name.strip().lower() == HEARTBEAT:
            asked = value.strip().strip('"')
            return min(max(float(asked), SHORTEST_HEARTBEAT_S), PERIOD_S) if asked.isdecimal() else None
    return None


ADVICE = "name samples of a task with samples_from, or split the request: jobs.max_body_bytes bounds what is kept"


async def submitted(
    request: Request,
    request_id: str,
    caller: Caller,
    most_bytes: int,
    admitted: AdmittedRequest,
    jobs: JobRunner | None,
) -> OpenedJob:
    """Reads the body and opens its job; see `JobRunner.open`.

    Raises:
        JobsNotConfigured: the service keeps no jobs.
        RequestProblem: whatever is wrong with the request.
    """
    jobs, key = required(jobs), idempotency_key(request.headers)
    media_type = rollout_media_type(request.headers)
    body = await read_body(request, min(most_bytes, jobs.max_body_bytes), ADVICE, admitted.hold_body)
    fingerprint, compressed = await asyncio.to_thread(
        lambda: (_fingerprint_of(body, media_type), compressed_body(body))
    )
    job_request = JobRequest(
        namespace=caller.namespace, media_type=media_type, request_id=request_id, key=key, fingerprint=fingerprint
    )
    # The job holds its own: what this request held would count twice.
    admitted.free()
    return await jobs.open(job_request, compressed)


def required(jobs: JobRunner | None) -> JobRunner:
    """Raises `JobsNotConfigured`."""
    if jobs is None:
        message = "the service's config has no jobs; post to /rollout, without Idempotency-Key"
        raise JobsNotConfigured.of("", message)
    return jobs


def _fingerprint_of(body: bytes | bytearray, media_type: str) -> str:
    digest = sha256(media_type.encode() + b"\n")
    digest.update(body)
    return digest.hexdigest()
