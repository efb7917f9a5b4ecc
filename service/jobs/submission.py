"""From the bytes of a `POST /rollout` or `/jobs` to its job."""

import asyncio
from dataclasses import dataclass
from hashlib import sha256

from fastapi import Request

from deployments.jobs.failures import JobsNotConfigured, refused
from deployments.jobs.records import JobRequest, Opened
from service.access.keys import Caller
from service.admission.admission import AdmittedRequest
from service.http.request_body import read_body, rollout_media_type
from service.jobs.player import compressed_body
from service.jobs.runner import JobRunner

MOST_BYTES_INLINE = 2**16
ADVICE = "name samples of a task with samples_from, or split the request: jobs.max_body_bytes bounds what is kept"
ROLLOUT = "rollout"
"""The kind of a job that plays one `RolloutRequest`, whichever route made it."""


@dataclass(frozen=True, slots=True)
class Submission:
    """What is known of a request beside its body."""

    caller: Caller
    request_id: str
    key: str | None
    runs_alone: bool

    @property
    def namespace(self) -> str:
        return namespace_of(self.caller)


def namespace_of(caller: Caller) -> str:
    """Under which the jobs of a caller are kept; no key has an empty name."""
    return caller.name or ""


async def submitted(
    request: Request, submission: Submission, most_bytes: int, admitted: AdmittedRequest, jobs: JobRunner | None
) -> Opened:
    """Reads the body and opens its job; see `JobRunner.open`.

    Raises:
        JobsNotConfigured: the service keeps no jobs.
        RequestProblem: whatever is wrong with the request.
    """
    jobs = required(jobs)
    media_type = rollout_media_type(request.headers)
    body = await read_body(request, min(most_bytes, jobs.max_body_bytes), ADVICE, admitted.hold_body)
    if len(body) <= MOST_BYTES_INLINE:
        fingerprint, compressed = fingerprint_of(body, media_type), compressed_body(body)
    else:
        fingerprint, compressed = await asyncio.to_thread(
            lambda: (fingerprint_of(body, media_type), compressed_body(body))
        )
    job_request = JobRequest(
        namespace=submission.namespace,
        kind=ROLLOUT,
        media_type=media_type,
        request_id=submission.request_id,
        key=submission.key,
        fingerprint=fingerprint,
        runs_alone=submission.runs_alone,
    )
    # The job holds its own: what this request held would count twice.
    admitted.free()
    return await jobs.open(job_request, compressed)


def required(jobs: JobRunner | None) -> JobRunner:
    """Raises `JobsNotConfigured`."""
    if jobs is None:
        message = "the service's config has no jobs; post to /rollout, without Idempotency-Key and respond-async"
        raise refused(JobsNotConfigured, "", message)
    return jobs


def fingerprint_of(body: bytes | bytearray, media_type: str) -> str:
    digest = sha256(media_type.encode() + b"\n")
    digest.update(body)
    return digest.hexdigest()
