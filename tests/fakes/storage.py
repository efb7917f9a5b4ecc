"""A storage in memory, which a store that starts again finds as the one before it has left it."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from deployments.storage.storage import EntryName, Storage, StorageFailed, StoredChange, StoredRecord, StoreReplaced


@dataclass
class Kept:
    """Records and entries, as changes leave them."""

    records: dict[str, bytes] = field(default_factory=dict)
    entries: dict[str, dict[EntryName, bytes]] = field(default_factory=dict)
    epoch: int = 0
    """Of the store that may change them."""

    def loaded(self) -> list[StoredRecord]:
        return [
            StoredRecord(name, record, {entry: len(data) for entry, data in self.entries[name].items()})
            for name, record in self.records.items()
        ]


class ScriptedStorage(Storage):
    """Raises the errors of its script first, `errors` in place of storing something."""

    def __init__(self, kept: Kept | None = None, errors: Sequence[Exception] = ()) -> None:
        self.kept = Kept() if kept is None else kept
        self.errors = list(errors)
        self.read_errors: list[Exception] = []
        self.is_failing = False
        self.gate = asyncio.Event()
        self.gate.set()
        self.epoch = 0

    async def take_over(self) -> list[StoredRecord]:
        self.fail()
        self.epoch = self.kept.epoch = self.kept.epoch + 1
        return self.kept.loaded()

    async def apply(self, changes: Sequence[StoredChange]) -> None:
        await self.gate.wait()
        self.fail()
        if self.errors:
            raise self.errors.pop(0)
        if self.epoch != self.kept.epoch:
            raise StoreReplaced("by another")
        for change in changes:
            self.change(change)

    def change(self, change: StoredChange) -> None:
        if change.record is None:
            self.kept.records.pop(change.record_id, None)
            self.kept.entries.pop(change.record_id, None)
            return
        self.kept.records[change.record_id] = change.record
        entries = self.kept.entries.setdefault(change.record_id, {})
        for name in change.removed:
            entries.pop(name, None)
        entries.update(change.added)

    async def read(self, record_id: str, names: Sequence[EntryName]) -> dict[EntryName, bytes]:
        if self.read_errors:
            raise self.read_errors.pop(0)
        self.fail()
        entries = self.kept.entries.get(record_id, {})
        return {name: entries[name] for name in names if name in entries}

    def fail(self) -> None:
        if self.is_failing:
            raise StorageFailed("no room")
