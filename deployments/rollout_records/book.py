"""Which records of rollouts are kept, as a state machine without I/O. A record is bytes to it. With its settings, and
every way in which a call about a record can be refused, each a problem document of the ingress.

Guarantees: all records together have at most the bytes that the settings allow; where they would have more, the owner
who has the most loses the oldest.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from pydantic import Field

from deployments.failures import StoreFailure
from deployments.rollout_records.comparison import MOST_COUNTED
from deployments.strict_settings import StrictSettings

MIB = 2**20


class RolloutRecordsSettings(StrictSettings):
    most_mean_ratio: float = Field(default=1.1, gt=1, lt=MOST_COUNTED)
    """Mean probability ratio above which a trainer's reports count as a mismatch, where no token counts as more than
    10. Rounding in bfloat16 makes one or two percent."""
    max_bytes: int = Field(default=512 * MIB, ge=1)
    """Bound of all records together, in memory: beyond it the caller who has the most loses the oldest. A token takes
    about 10 bytes. A restart of the store forgets all."""


class RolloutRecordsNotConfigured(StoreFailure):
    """The service keeps no records of rollouts."""

    status = 501
    name = "rollout-records-not-configured"
    title = "The service keeps no records of rollouts"


def records_not_configured(field: str = "rollout_records") -> RolloutRecordsNotConfigured:
    """The failure of a request in which `field` asks for records."""
    return RolloutRecordsNotConfigured.of(field, "the config has no `rollout_records`; add `rollout_records: {}`")


class RolloutUnknown(StoreFailure):
    """The rollout never was, is another caller's, or its record is not kept any more."""

    status = 404
    name = "rollout-unknown"
    title = "There is no record of the rollout"


NO_RECORD = (
    "there is no record of it: it has not ended, it is another key's, or newer ones took its place "
    "(rollout_records.max_bytes)"
)


def rollout_unknown(rollout_id: str) -> RolloutUnknown:
    return RolloutUnknown.of("rollout_id", NO_RECORD, rollout_id)


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
