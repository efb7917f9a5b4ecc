"""The port to a store's durable storage: `Storage`, the records that it keeps, and the settings that name it.

A record has entries by name; to a storage both are bytes. `SqliteStorage` and `RedisStorage`
(`deployments/storage/databases.py`) implement it.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol, Self

from pydantic import Field, model_validator
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_fixed

from deployments.failures import StoreLost
from deployments.strict_settings import StrictSettings


class EntryName(NamedTuple):
    """One entry of a record; equal names replace each other."""

    kind: str
    number: int


@dataclass(frozen=True, slots=True)
class StoredChange:
    """A change of one record. A storage makes all changes of one call, or none."""

    record_id: str
    record: bytes | None
    """`None` removes the record with all its entries."""
    added: Mapping[EntryName, bytes] = field(default_factory=dict)
    removed: Collection[EntryName] = ()


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """A record as it is found at the start of a store."""

    record_id: str
    record: bytes
    sizes: dict[EntryName, int]
    """In bytes, of all entries."""


StoreKind = Literal["job", "session", "image"]
"""The kind of a store. Storages of different kinds share nothing."""


class StoreReplaced(StoreLost):
    """A newer store has taken the records over: this one must end."""


class StorageFailed(StoreLost):
    """The database has failed. The same call can succeed later: the disk is full, or the database is away."""


class Storage(Protocol):
    """One store at a time writes: the last one that has called `take_over`.

    Each call raises `StorageFailed`, whose cause is what the database's library raised.
    """

    async def take_over(self) -> list[StoredRecord]:
        """All records that are kept. What an earlier store writes from now on raises `StoreReplaced`."""
        ...

    async def apply(self, changes: Sequence[StoredChange]) -> None:
        """Makes all changes, or none. Returns when they outlive this process. Raises `StoreReplaced`.

        After `StorageFailed` nobody knows whether they were made; made again, they change nothing the second time.
        """
        ...

    async def read(self, record_id: str, names: Sequence[EntryName]) -> dict[EntryName, bytes]:
        """The entries that exist, by their names."""
        ...


AWAY_S = 60.0
"""Wait for a store that has died: the next one takes about ten seconds to start."""
AWAY_RETRY_S = 0.5


def attempts(
    lost: type[Exception] | tuple[type[Exception], ...],
    within_s: float = AWAY_S,
    on_first: Callable[[BaseException | None], None] = lambda _: None,
) -> AsyncRetrying:
    """Calls a store or its storage again, for as long as the call raises `lost`: a repeated call changes nothing.

    Args:
        within_s: seconds after which the last failure is raised.
        on_first: called with the first failure.
    """
    ends_at = asyncio.get_running_loop().time() + within_s

    def before_sleep(state: RetryCallState) -> None:
        if state.attempt_number == 1 and state.outcome is not None:
            on_first(state.outcome.exception())

    return AsyncRetrying(
        retry=retry_if_exception_type(lost),
        wait=wait_fixed(AWAY_RETRY_S),
        stop=lambda _: asyncio.get_running_loop().time() >= ends_at,
        before_sleep=before_sleep,
        reraise=True,
    )


class StorageSettings(StrictSettings):
    folder: str | None = None
    """Where they are kept, in a SQLite database. If the folder outlives the machine, so do they. It must be on a disk
    of the node itself: SQLite is not safe on a network file system. Default: a temporary folder of the Ray cluster,
    which lives as long as the cluster."""
    redis_url: str | None = None
    """A Redis in place of the folder, such as `redis://:password@host:6379/0`. A cluster of several nodes needs it,
    because the store may be started again on another node."""
    redis_password_file: str | None = None
    """A file with the password of the Redis, such as a mounted secret, in place of one in `redis_url`, which counts if
    both are there. Every node needs it."""
    redis_prefix: str = Field(default="rollout", min_length=1, max_length=100)
    """Begins the names of all keys in Redis: two services that share a Redis need two prefixes."""

    @model_validator(mode="after")
    def _password_has_a_redis(self) -> Self:
        if self.redis_password_file is not None and self.redis_url is None:
            raise ValueError("redis_password_file has no meaning without redis_url: give both or neither")
        return self
