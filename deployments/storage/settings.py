"""Settings of a storage: which database keeps the records of a store."""

from typing import Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from deployments.strict_settings import StrictSettings


class StorageSettings(StrictSettings):
    folder: str | None = None
    """Where they are kept, in a SQLite database. If the folder outlives the machine, so do they. It must be on a disk
    of the node itself: SQLite is not safe on a network file system. Default: a temporary folder of the Ray cluster,
    which lives as long as the cluster."""
    redis_url: str | None = None
    """A Redis in place of the folder, such as `redis://:password@host:6379/0`. A cluster of several nodes needs it,
    because the store may be started again on another node."""
    redis_password_file: str | None = None
    """A file with the password of the Redis, such as a mounted secret, in place of one in `redis_url`. Every node
    needs it."""
    redis_prefix: str = Field(default="rollout", min_length=1, max_length=100)
    """Begins the names of all keys in Redis: two services that share a Redis need two prefixes."""

    @model_validator(mode="after")
    def _password_has_a_redis(self) -> Self:
        if self.redis_password_file is not None and self.redis_url is None:
            raise ValueError("redis_password_file has no meaning without redis_url: give both or neither")
        if self.redis_password_file is not None and _has_password(self.redis_url):
            raise ValueError(
                "redis_url has a password, and redis_password_file names another one: remove one of the two"
            )
        return self


def _has_password(redis_url: str | None) -> bool:
    return redis_url is not None and urlsplit(redis_url).password is not None
