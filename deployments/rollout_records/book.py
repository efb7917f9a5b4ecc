"""Which records of rollouts are kept, as a state machine without I/O. A record is bytes to it.

Guarantees: all records together have at most the bytes that the settings allow; where they would have more, the owner
who has the most loses the oldest.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from deployments.rollout_records.failures import rollout_unknown
from deployments.rollout_records.settings import RolloutRecordsSettings

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")
BYTES_PER_ENTRY = 512
"""Taken by the place of a record beside its bytes."""


@dataclass(frozen=True, slots=True)
class KeptRecord:
    """The record of one rollout. `owner` is the name of a key; the empty one, where nobody needs a key."""

    rollout_id: str
    owner: str
    data: bytes
    ended_at: float
    """In seconds since 1970, by the clock of the ingress that played it."""
    kept_at: float = 0.0
    """When the store took it, by its own clock."""

    @property
    def size(self) -> int:
        return len(self.data) + BYTES_PER_ENTRY


class OwnedValues(Generic[Key, Value]):
    """Values by owner and key. Beyond `most` of all owners together, the owner who has the most loses the oldest.

    Args:
        size_of: the part of `most` that a value takes; by default one.
    """

    def __init__(self, most: int, size_of: Callable[[Value], int] = lambda _: 1) -> None:
        self._most = most
        self._size_of = size_of
        self._by_owner: dict[str, OrderedDict[Key, Value]] = {}
        """Those of an owner that were set last are at the end."""
        self._sizes: dict[str, int] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_owner.values()))

    def __iter__(self) -> Iterator[tuple[str, Key, Value]]:
        return ((owner, key, value) for owner, values in self._by_owner.items() for key, value in values.items())

    @property
    def size(self) -> int:
        """Size of all values together."""
        return sum(self._sizes.values())

    def get(self, owner: str, key: Key) -> Value | None:
        return self._by_owner.get(owner, OrderedDict()).get(key)

    def newest(self, owner: str) -> Iterator[Value]:
        """The values of the owner, the newest first."""
        return reversed(self._by_owner.get(owner, OrderedDict()).values())

    def set(self, owner: str, key: Key, value: Value) -> None:
        """Keeps the value as the newest, in place of one of the same key; none that is larger than all may be."""
        self._drop(owner, key)
        if (size := self._size_of(value)) > self._most:
            return
        self._by_owner.setdefault(owner, OrderedDict())[key] = value
        self._sizes[owner] = self._sizes.get(owner, 0) + size
        while self.size > self._most:
            self._drop_oldest(max(self._sizes, key=self._sizes.__getitem__))

    def replace(self, owner: str, key: Key, value: Value) -> None:
        """Puts another value in the place of one that is kept, if there is room for it."""
        grown = self._size_of(value) - self._size_of(self._by_owner[owner][key])
        if self.size + grown <= self._most:
            self._by_owner[owner][key] = value
            self._sizes[owner] += grown

    def drop_oldest_while(self, is_over: Callable[[Key, Value], bool]) -> None:
        """Drops the oldest of each owner as long as `is_over` says so."""
        for owner, values in list(self._by_owner.items()):
            while values and is_over(*next(iter(values.items()))):
                self._drop_oldest(owner)

    def _drop_oldest(self, owner: str) -> None:
        self._drop(owner, next(iter(self._by_owner[owner])))

    def _drop(self, owner: str, key: Key) -> None:
        values = self._by_owner.get(owner)
        if values is None or key not in values:
            return
        self._sizes[owner] -= self._size_of(values.pop(key))
        if not values:
            del self._by_owner[owner], self._sizes[owner]


class RecordBook(OwnedValues[str, KeptRecord]):
    """The records that are kept, each under its `rollout_id`; their size is in bytes."""

    def __init__(self, settings: RolloutRecordsSettings) -> None:
        super().__init__(settings.max_bytes, lambda record: record.size)
        self._keep_s = settings.keep_s

    def put(self, record: KeptRecord) -> None:
        """Keeps the record, in place of one of the same id. One that is larger than all may be is not kept."""
        self.set(record.owner, record.rollout_id, record)

    def record(self, rollout_id: str, owner: str) -> KeptRecord:
        """Raises `RolloutUnknown`, also for another owner's."""
        record = self.get(owner, rollout_id)
        if record is None:
            raise rollout_unknown(rollout_id)
        return record

    def replace_data(self, record: KeptRecord, data: bytes) -> None:
        """The record has other data from now on. One that is not kept any more, or would be too large, is left."""
        kept = self.get(record.owner, record.rollout_id)
        if kept is not None and kept.data is record.data:
            self.replace(record.owner, record.rollout_id, replace(kept, data=data))

    def expire(self, now: float) -> None:
        """Forgets the records whose time is over."""
        self.drop_oldest_while(lambda _, record: record.kept_at + self._keep_s <= now)
