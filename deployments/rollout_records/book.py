"""Which records of rollouts are kept, as a state machine without I/O. A record is bytes to it.

Guarantees: all records together have at most the bytes that the settings allow; where they would have more, the owner
who has the most loses the oldest.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from deployments.rollout_records.failures import rollout_unknown

BYTES_PER_ENTRY = 512
"""Taken by the place of a record beside its bytes."""


@dataclass(frozen=True, slots=True)
class KeptRecord:
    """The record of one rollout. `owner` is the name of a key; the empty one, where nobody needs a key."""

    rollout_id: str
    owner: str
    data: bytes

    @property
    def size(self) -> int:
        return len(self.data) + BYTES_PER_ENTRY


class RecordBook:
    """The records that are kept, by owner and `rollout_id`, in the order in which they came."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._by_owner: defaultdict[str, dict[str, KeptRecord]] = defaultdict(dict)
        self._sizes: defaultdict[str, int] = defaultdict(int)

    @property
    def size(self) -> int:
        """Bytes of all records together."""
        return sum(self._sizes.values())

    def newest(self, owner: str) -> Iterator[KeptRecord]:
        """The records of the owner, the newest first."""
        return reversed([*self._by_owner[owner].values()])

    def record(self, rollout_id: str, owner: str) -> KeptRecord:
        """Raises `RolloutUnknown`, also for another owner's."""
        if (record := self._by_owner[owner].get(rollout_id)) is None:
            raise rollout_unknown(rollout_id)
        return record

    def put(self, record: KeptRecord) -> None:
        """Keeps the record, at the place of one of the same id. One that is larger than all may be is not kept."""
        if record.size > self._max_bytes:
            return
        kept = self._by_owner[record.owner]
        before = kept.get(record.rollout_id)
        kept[record.rollout_id] = record
        self._sizes[record.owner] += record.size - (0 if before is None else before.size)
        while self.size > self._max_bytes:
            owner = max(self._sizes, key=self._sizes.__getitem__)
            oldest = next(iter(self._by_owner[owner]))
            self._sizes[owner] -= self._by_owner[owner].pop(oldest).size

    def replace(self, before: KeptRecord, after: KeptRecord) -> None:
        """Puts one record in the place of another, unless that is not kept any more."""
        if self._by_owner[before.owner].get(before.rollout_id) is before:
            self.put(after)
