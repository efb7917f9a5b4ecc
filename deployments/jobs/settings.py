"""Settings of the job store: where requests with an `Idempotency-Key` and jobs are kept, and for how long."""

from pydantic import Field

from deployments.storage.storage import StorageSettings

GIB = 2**30


class JobsSettings(StorageSettings):
    keep_s: float = Field(default=86_400, gt=0)
    """A job that has ended is forgotten after so many seconds, with the groups that nobody has acknowledged."""
    max_bytes: int = Field(default=16 * GIB, ge=1)
    """Bound of all jobs together: compressed bodies, journals and unacknowledged groups, and 64 KiB for each job. At
    this bound new jobs are refused with 429; those that run go on."""
    max_share: float = Field(default=0.5, gt=0, le=1)
    """Share of `max_bytes` that the jobs of one caller may take. Where nobody needs a key, all callers
    are one."""
    max_body_bytes: int = Field(default=64 * 2**20, ge=1)
    """A larger body is refused with 413: name samples of a task with `samples_from`, or split it."""
    lease_s: float = Field(default=5, gt=0)
    """An ingress replica that was not heard of for so many seconds has lost its jobs, and another one goes on with
    them."""
