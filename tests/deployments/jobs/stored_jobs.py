"""The records of a job store, without a store: for tests of the registry alone."""

from collections.abc import Iterable
from typing import NamedTuple

from deployments.jobs.records import Change, JobRecord, JobRequest
from deployments.storage.storage import EntryName
from tests.fakes.storage import ScriptedStorage


class Asked(NamedTuple):
    request: JobRequest
    owner: str


def asked(key: str | None = "k", owner: str = "a", namespace: str = "", fingerprint: str = "f") -> Asked:
    return Asked(JobRequest(namespace=namespace, request_id="r", key=key, fingerprint=fingerprint), owner)


def event(number: int) -> EntryName:
    return EntryName("event", number)


def journal(number: int) -> EntryName:
    return EntryName("journal", number)


class StoredJobs:
    """Records and entries, as changes leave them."""

    def __init__(self) -> None:
        self.records: dict[str, JobRecord] = {}
        self.storage = ScriptedStorage()
        self.entries = self.storage.kept.entries

    def apply(self, changes: Iterable[Change]) -> None:
        for change in changes:
            self.storage.change(change.stored)
            self.records.pop(change.job_id, None)
            if change.record is not None:
                self.records[change.job_id] = change.record
