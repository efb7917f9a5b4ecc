"""Settings of the job store: where requests with an `Idempotency-Key` and jobs are kept, and for how long."""

from pydantic import Field

from deployments.strict_settings import StrictSettings

GIB = 2**30


class JobsSettings(StrictSettings):
    folder: str | None = None
    """Where jobs are kept, in a SQLite database. If it outlives the machine, so do the jobs. It must be on a disk of
    the node itself: SQLite is not safe on a network file system. Default: a temporary folder of the Ray cluster, which
    lives as long as the cluster."""
    redis_url: str | None = None
    """A Redis in place of the folder, such as `redis://:password@host:6379/0`. A cluster of several nodes needs it,
    because the store may be started again on another node."""
    redis_prefix: str = Field(default="rollout", min_length=1, max_length=100)
    """Begins the names of all keys in Redis: two services that share a Redis need two prefixes."""
    keep_s: float = Field(default=86_400, gt=0)
    """A job that has ended is forgotten after so many seconds, with the groups that nobody has acknowledged."""
    max_bytes: int = Field(default=16 * GIB, ge=1)
    """Of all jobs together: compressed bodies, journals and groups that were not acknowledged. At this bound new jobs
    are refused with 429; those that run go on."""
    max_jobs: int = Field(default=100_000, ge=1)
    """Jobs that are kept, those that have ended included."""
    max_share: float = Field(default=0.5, gt=0, le=1)
    """Of `max_jobs` and `max_bytes`: how much the jobs of one caller may take. Where nobody needs a key, all is one
    caller's."""
    max_body_bytes: int = Field(default=64 * 2**20, ge=1)
    """A larger body is refused with 413: name samples of a task with `samples_from`, or split it."""
    lease_s: float = Field(default=5, gt=0)
    """An ingress replica that was not heard of for so many seconds has lost its jobs, and another one goes on with
    them."""
    abandoned_after_s: float = Field(default=60, gt=0)
    """A `POST /rollout` with an `Idempotency-Key` stops when no connection has waited for it for so many seconds.
    Posted again, it goes on at the turn where it was. Jobs of `/jobs` run without a listener."""
