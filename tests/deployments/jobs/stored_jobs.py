"""The records of a job store, without a store: for tests of the registry alone."""

from collections.abc import Iterable
from typing import NamedTuple

from deployments.jobs.records import Change, JobRecord, JobRequest, _encode_record
from deployments.storage.storage import EntryName, StoredRecord


class Asked(NamedTuple):
    request: JobRequest
    owner: str


def asked(key: str | None = "k", owner: str = "a", namespace: str = "", fingerprint: str = "f") -> Asked:
    request = JobRequest(namespace=namespace, request_id="r", key=key, fingerprint=fingerprint)
    return Asked(request, owner)


def event(number: int) -> EntryName:
    return EntryName("event", number)


def journal(number: int) -> EntryName:
    return EntryName("journal", number)


class StoredJobs:
    """Records and entries, as changes leave them."""

    def __init__(self) -> None:
        self.records: dict[str, JobRecord] = {}
        self.entries: dict[str, dict[EntryName, bytes]] = {}
        self.epoch = 0
        """Of the store that may change them."""

    def apply(self, changes: Iterable[Change]) -> None:
        for change in changes:
            if change.record is None:
                self.records.pop(change.job_id, None)
                self.entries.pop(change.job_id, None)
                continue
            self.records[change.job_id] = change.record
            entries = self.entries.setdefault(change.job_id, {})
            for name in change.removed:
                entries.pop(name, None)
            entries.update(change.added)

    def stored(self) -> list[StoredRecord]:
        return [
            StoredRecord(name, _encode_record(record), {entry: len(data) for entry, data in self.entries[name].items()})
            for name, record in self.records.items()
        ]
