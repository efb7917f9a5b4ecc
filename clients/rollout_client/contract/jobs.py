"""The contract of `/jobs`: rollouts that outlive their connection, with numbered events.

Docstrings under the fields are the descriptions in the service's OpenAPI document.
"""

from typing import Annotated, Literal

from pydantic import Field

from rollout_client.contract.base import Lenient, Problem, Strict
from rollout_client.contract.rollouts import RolloutSummary, SampleResult
from rollout_client.contract.selection import SampleRange

JobState = Literal["waiting", "running", "completed", "failed"]
IDEMPOTENCY_KEY = "idempotency-key"
"""The header that names a request: sent again with the same body it is the same run."""
PREFER = "prefer"
HEARTBEAT = "heartbeat"
"""A preference with a number of seconds: a stream that is silent for so long sends an empty line."""
EventNumber = Annotated[int, Field(ge=0, lt=2**53)]


class JobStatus(Lenient):
    """One job."""

    job_id: str
    """Its name in the paths of `/jobs`."""
    state: JobState
    """`running`: an ingress replica plays it; `waiting`: that one was lost and the next one takes it over;
    `completed`, `failed`: its last event is there, a summary or a problem."""
    request_id: str
    """The `X-Request-ID` of the request that made it, in every log line about it."""
    created_at: float
    """Seconds since 1970."""
    ended_at: float | None = None
    """When it ended."""
    last_event: int
    """Events are numbered from 1 to this."""
    acknowledged: int
    """Events up to this one are not kept any longer."""
    idempotency_key: str | None = None
    """The key with which its request was sent, if there was one."""


class JobList(Lenient):
    """The jobs of the caller."""

    jobs: list[JobStatus]
    """The newest first."""


class Acknowledgement(Strict):
    """The body of `POST /jobs/{job_id}/acknowledge`."""

    last: EventNumber
    """Events up to this one have arrived and need not be kept."""


class JobCursor(Lenient):
    """The part of a job over a data set that a trainer's checkpoint has: the answer of `GET /jobs/{job_id}/cursor`."""

    job_id: str
    """The job."""
    event: int
    """Events up to this one have arrived, and the checkpoint has what they brought."""
    samples_from: list[SampleRange]
    """The job's ranges without the samples that are in those events: posted as `samples_from`, they are played, and no
    other sample is. A sample whose group has failed is left in them: none of its rollouts was played to its end, and
    each has the status `error`, `deadline`, `stale` or `cancelled`. With the revision of their data: they are refused
    where the data have changed."""
    kept: int | None = None
    """With `keep.where`: how many groups those events have; null before the first. `samples_from` begins after the last
    sample that was drawn for them. A job for the rest has that many fewer in `keep.groups`."""

    @property
    def samples_left(self) -> int:
        """How many samples have no group that was played in the events up to `event`."""
        return sum(drawn.size for drawn in self.samples_from)

    def ranges_to_play(self) -> list[SampleRange]:
        """The ranges that have samples."""
        return [drawn for drawn in self.samples_from if drawn.size]


class PositionedResult(Lenient):
    """One rollout with its place."""

    position: int
    """Index of the rollout in the response of `POST /rollout`."""
    sample: SampleResult
    """The rollout."""


class JobEvent(Lenient):
    """One event of a job: a group that has ended or, as the last one, the summary or the problem."""

    event: int
    """Its number. A stream that is asked for with `after` goes on after this one."""
    samples: list[PositionedResult] = []  # noqa: RUF012 - pydantic copies it
    """All rollouts of one group."""
    summary: RolloutSummary | None = None
    """Every group has ended."""
    problem: Problem | None = None
    """The job has failed; no further group comes."""

    @property
    def is_last(self) -> bool:
        return self.summary is not None or self.problem is not None
