"""From the headers and the bytes of a `POST /rollout` or `/jobs` to its job.

The headers `Idempotency-Key` and `Prefer` say how it is played and answered; reading them does no I/O.
"""

import asyncio
import re
from hashlib import sha256

import zstandard
from fastapi import Request
from starlette.datastructures import Headers

from deployments.jobs.records import JobRequest, JobsNotConfigured, OpenedJob
from rollout_client.contract.base import FieldProblem
from rollout_client.contract.jobs import HEARTBEAT, IDEMPOTENCY_KEY, PREFER
from service.access.keys import Caller
from service.admission.admission import AdmittedRequest
from service.http.middlewares import request_id_of
from service.http.request_body import read_body, refuse_other_than_json
from service.http.streaming import PERIOD_S
from service.jobs.runner import JobRunner
from service.problems import RequestProblem, invalid_request, shown

KEY = re.compile(r'"(?P<quoted>(?:[ !#-\[\]-~]|\\["\\]){1,255})"|(?P<bare>[A-Za-z0-9._~-]{1,255})')
"""A String of RFC 9651, as draft-ietf-httpapi-idempotency-key-header has it; or, as many clients send it, a key without
quotes."""
PREFERENCE = re.compile(rf'(?:^|,)[ \t]*{HEARTBEAT}[ \t]*=[ \t]*"?([0-9]+)', re.IGNORECASE)
SHORTEST_HEARTBEAT_S = 1.0


def idempotency_key(headers: Headers) -> str | None:
    """The key of a request; `None` without one.

    Raises:
        RequestProblem: 422, the header is there more than once or has another form.
    """
    if IDEMPOTENCY_KEY not in headers:
        return None
    given = ", ".join(headers.getlist(IDEMPOTENCY_KEY))
    if (key := KEY.fullmatch(given)) is None:
        raise _bad_key('send one of the form "KEY", with 1 to 255 characters of ASCII', given)
    return key["bare"] or re.sub(r"\\(.)", r"\1", key["quoted"])


def required_key(headers: Headers) -> str:
    """As `idempotency_key`; raises `RequestProblem`, 422, for a request without one."""
    key = idempotency_key(headers)
    if key is None:
        raise _bad_key("it is missing; send the one with which the request was posted", None)
    return key


def _bad_key(message: str, value: str | None) -> RequestProblem:
    return invalid_request(FieldProblem(field="header.Idempotency-Key", message=message, value=shown(value)))


def heartbeat_s(headers: Headers) -> float | None:
    """The silence in seconds after which a stream sends an empty line; `None` if the caller does not ask for it.

    A preference of RFC 7240: `Prefer: heartbeat=15`.
    """
    wanted = PREFERENCE.search(",".join(headers.getlist(PREFER)))
    return min(max(float(wanted[1]), SHORTEST_HEARTBEAT_S), PERIOD_S) if wanted else None


ADVICE = "name samples of a task with samples_from, or split the request: jobs.max_body_bytes bounds what is kept"


async def submitted(
    request: Request, caller: Caller, most_bytes: int, admitted: AdmittedRequest, jobs: JobRunner | None
) -> OpenedJob:
    """Reads the body and opens its job; see `JobRunner.open`.

    Raises:
        JobsNotConfigured: the service keeps no jobs.
        RequestProblem: whatever is wrong with the request.
    """
    jobs, key = required(jobs), idempotency_key(request.headers)
    refuse_other_than_json(request.headers)
    body = await read_body(request, min(most_bytes, jobs.max_body_bytes), ADVICE, admitted.hold_body)
    fingerprint, compressed = await asyncio.to_thread(_fingerprint_and_compressed, body)
    name = request_id_of(request)
    job_request = JobRequest(namespace=caller.namespace, request_id=name, key=key, fingerprint=fingerprint)
    # The job holds its own: what this request held would count twice.
    admitted.free()
    return await jobs.open(job_request, compressed)


def required(jobs: JobRunner | None) -> JobRunner:
    """Raises `JobsNotConfigured`."""
    if jobs is None:
        raise JobsNotConfigured.of("", "the service's config has no jobs; post to /rollout, without Idempotency-Key")
    return jobs


def _fingerprint_and_compressed(body: bytes | bytearray) -> tuple[str, bytes]:
    return sha256(body).hexdigest(), zstandard.ZstdCompressor(level=1).compress(bytes(body))
