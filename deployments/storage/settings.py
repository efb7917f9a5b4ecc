"""Settings of a storage: which database keeps the records of a store."""

from pydantic import Field

from deployments.strict_settings import StrictSettings


class StorageSettings(StrictSettings):
    folder: str | None = None
    """Where they are kept, in a SQLite database. If the folder outlives the machine, so do they. It must be on a disk
    of the node itself: SQLite is not safe on a network file system. Default: a temporary folder of the Ray cluster,
    which lives as long as the cluster."""
    redis_url: str | None = None
    """A Redis in place of the folder, such as `redis://:password@host:6379/0`. A cluster of several nodes needs it,
    because the store may be started again on another node."""
    redis_prefix: str = Field(default="rollout", min_length=1, max_length=100)
    """Begins the names of all keys in Redis: two services that share a Redis need two prefixes."""
