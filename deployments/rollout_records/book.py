"""Which records of rollouts are kept, as a state machine without I/O. A record is bytes to it.

Guarantees: all records together have at most the bytes that the settings allow; where they would have more, the owner
who has the most loses the oldest.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, replace

from deployments.rollout_records.failures import rollout_unknown
from deployments.rollout_records.settings import RolloutRecordsSettings

BYTES_PER_ENTRY = 512
"""Taken by the place of a record beside its bytes."""
BYTES_PER_NOTE = 256
MOST_NOTES = 256
"""Notes of one name that a record keeps, the last ones."""


@dataclass(frozen=True, slots=True)
class RecordNote:
    """Something about a rollout that has happened after its end."""

    rollout_id: str
    owner: str
    name: str
    """The field of the record that lists such notes."""
    data: bytes


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
    notes: tuple[RecordNote, ...] = ()
    """In the order in which they came."""

    @property
    def size(self) -> int:
        return len(self.data) + BYTES_PER_ENTRY + sum(len(note.data) + BYTES_PER_NOTE for note in self.notes)


class RecordBook:
    """The records that are kept, each under its `rollout_id`."""

    def __init__(self, settings: RolloutRecordsSettings) -> None:
        self._settings = settings
        self._by_owner: dict[str, OrderedDict[str, KeptRecord]] = {}
        """By owner and id, the oldest first."""
        self._sizes: dict[str, int] = {}
        """By owner, in bytes."""

    def __len__(self) -> int:
        return sum(map(len, self._by_owner.values()))

    @property
    def size(self) -> int:
        """Bytes of all records together."""
        return sum(self._sizes.values())

    def put(self, record: KeptRecord) -> None:
        """Keeps the record, in place of one of the same id. One that is larger than all may be is not kept."""
        self._remove(record.owner, record.rollout_id)
        if record.size > self._settings.max_bytes:
            return
        self._by_owner.setdefault(record.owner, OrderedDict())[record.rollout_id] = record
        self._sizes[record.owner] = self._sizes.get(record.owner, 0) + record.size
        while self.size > self._settings.max_bytes:
            largest = max(self._sizes, key=self._sizes.__getitem__)
            self._remove(largest, next(iter(self._by_owner[largest])))

    def record(self, rollout_id: str, owner: str) -> KeptRecord:
        """Raises `RolloutUnknown`, also for another owner's."""
        record = self._by_owner.get(owner, OrderedDict()).get(rollout_id)
        if record is None:
            raise rollout_unknown(rollout_id)
        return record

    def replace_data(self, record: KeptRecord, data: bytes) -> None:
        """The record has other data from now on. One that is not kept any more, or would be too large, is left."""
        kept = self._by_owner.get(record.owner, OrderedDict()).get(record.rollout_id)
        if kept is not None and kept.data is record.data:
            self._replace(kept, replace(kept, data=data))

    def add_note(self, note: RecordNote) -> None:
        """Adds a note to its record. One that is not kept, or would be too large, is left."""
        kept = self._by_owner.get(note.owner, OrderedDict()).get(note.rollout_id)
        if kept is None:
            return
        notes = [*kept.notes, note]
        if sum(other.name == note.name for other in notes) > MOST_NOTES:
            notes.remove(next(other for other in notes if other.name == note.name))
        self._replace(kept, replace(kept, notes=tuple(notes)))

    def _replace(self, kept: KeptRecord, changed: KeptRecord) -> None:
        grown = changed.size - kept.size
        if self.size + grown <= self._settings.max_bytes:
            self._by_owner[kept.owner][kept.rollout_id] = changed
            self._sizes[kept.owner] += grown

    def newest(self, owner: str) -> Iterator[KeptRecord]:
        """The records of the owner, the newest first."""
        return reversed(self._by_owner.get(owner, OrderedDict()).values())

    def expire(self, now: float) -> None:
        """Forgets the records whose time is over."""
        for owner, records in list(self._by_owner.items()):
            while records and next(iter(records.values())).kept_at + self._settings.keep_s <= now:
                self._remove(owner, next(iter(records)))
                records = self._by_owner.get(owner, OrderedDict())

    def _remove(self, owner: str, rollout_id: str) -> None:
        records = self._by_owner.get(owner)
        if records is None or (record := records.pop(rollout_id, None)) is None:
            return
        self._sizes[owner] -= record.size
        if not records:
            del self._by_owner[owner], self._sizes[owner]
