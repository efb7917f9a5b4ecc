"""What a storage keeps: records, each with entries by name. To a storage both are bytes."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class EntryName(NamedTuple):
    """One entry of a record; equal names replace each other."""

    kind: str
    number: int


@dataclass(frozen=True, slots=True)
class StoredChange:
    """What becomes of one record. A storage makes all changes of one call, or none."""

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
