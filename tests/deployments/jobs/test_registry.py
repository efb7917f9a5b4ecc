"""Who plays which job, and what is kept of it."""

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from deployments.jobs.records import (
    BODY,
    Claim,
    EventsAcknowledged,
    EventUnknown,
    JobsFull,
    JobUnknown,
    JobWrite,
    KeyReused,
    OpenedJob,
)
from deployments.jobs.registry import BYTES_PER_JOB, JobRegistry, JobsSettings
from tests.deployments.jobs.stored_jobs import Asked, StoredJobs, asked, event, journal

SETTINGS = JobsSettings(lease_s=5, keep_s=100, max_bytes=3 * BYTES_PER_JOB)


class TimedJobs:
    """A registry whose changes are stored and committed at once, and a clock."""

    def __init__(self, settings: JobsSettings = SETTINGS) -> None:
        self.kept = StoredJobs()
        self.settings = settings
        self.now = 0.0
        self.restart()

    def restart(self) -> None:
        self.registry = JobRegistry(self.settings, self.kept.storage.kept.loaded(), self.now)

    def commit(self, changes) -> None:  # type: ignore[no-untyped-def]
        self.kept.apply(changes)
        self.registry.commit(changes, self.now)

    def open(self, request: Asked, body: bytes = b"body") -> OpenedJob:
        opened, changes = self.registry.open(*request, body, self.now)
        self.commit(changes)
        return opened

    def claim(self, job_id: str, owner: str) -> Claim | None:
        claim, changes = self.registry.claim(job_id, owner)
        self.commit(changes)
        return claim

    def write(self, owner: str, write: JobWrite) -> bool:
        change = self.registry.write(owner, write, self.now)
        self.commit([] if change is None else [change])
        return change is not None

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.commit(self.registry.time_passed(self.now, self.now))

    def acknowledge(self, job_id: str, last: int) -> None:
        self.commit(self.registry.acknowledge(job_id, "", last))

    def delete(self, job_id: str) -> None:
        self.commit(self.registry.delete(job_id, ""))


def opened() -> tuple[TimedJobs, str]:
    """With one job, that `a` plays."""
    jobs = TimedJobs()
    return jobs, jobs.open(asked()).record.job_id


def test_a_key_is_its_callers_own_and_is_refused_with_another_request() -> None:
    jobs = TimedJobs()
    claim = jobs.open(asked()).claim
    assert claim is not None
    assert (claim.record.owner, claim.record.epoch, claim.entries) == ("a", 1, (BODY,))
    without_keys = TimedJobs()
    assert len({without_keys.open(asked(key=None)).record.job_id for _ in range(2)}) == 2
    with pytest.raises(KeyReused, match="it was sent with another request"):
        jobs.open(asked(fingerprint="other"))
    assert jobs.open(asked(namespace="other", fingerprint="other")).record.job_id != claim.record.job_id
    with pytest.raises(JobUnknown):
        jobs.registry.record(claim.record.job_id, "other")


def test_a_replica_that_asks_for_orders_keeps_the_jobs_that_it_plays() -> None:
    jobs = TimedJobs()
    played, broken_off = (jobs.open(asked(key=key, owner="a")).record.job_id for key in "12")
    jobs.wait(4.9)
    assert jobs.registry.poll("b", (), jobs.now).waiting == []
    for _ in range(10):
        assert jobs.registry.poll("a", [played], jobs.now).lost == []
        jobs.wait(4)
    assert [jobs.kept.records[job_id].owner for job_id in (played, broken_off)] == ["a", ""]
    assert jobs.claim(broken_off, "b") is not None
    assert jobs.claim(broken_off, "c") is None, "another replica was first"


def test_a_store_that_was_away_counts_its_absence_against_nobody() -> None:
    jobs, job_id = opened()
    jobs.now += 3600
    jobs.restart()
    jobs.wait(4)
    assert jobs.kept.records[job_id].owner == "a"
    jobs.wait(2)
    assert jobs.kept.records[job_id].state == "waiting"


def test_the_end_removes_what_only_the_run_needed() -> None:
    jobs, job_id = opened()
    jobs.write("a", JobWrite(job_id, 1, {journal(1): b"turn", journal(2): b"turn"}))
    jobs.write("a", JobWrite(job_id, 1, {event(1): b"group"}, removed=[journal(1)]))
    assert set(jobs.kept.entries[job_id]) == {BODY, journal(2), event(1)}
    jobs.write("a", JobWrite(job_id, 1, {event(2): b"summary"}, ended="completed"))
    assert set(jobs.kept.entries[job_id]) == {event(1), event(2)}
    assert jobs.registry.total_bytes == BYTES_PER_JOB + len(b"group") + len(b"summary")


def test_the_same_key_gets_the_answer_until_it_expires() -> None:
    jobs, job_id = opened()
    jobs.write("a", JobWrite(job_id, 1, {event(1): b"summary"}, ended="completed"))
    jobs.wait(99)
    again = jobs.open(asked(owner="b"))
    assert (again.record.job_id, again.record.state, again.claim) == (job_id, "completed", None)
    jobs.wait(2)
    assert jobs.open(asked(owner="b")).record.job_id != job_id
    assert job_id not in jobs.kept.records


def test_acknowledged_events_are_not_kept_and_the_others_are() -> None:
    jobs, job_id = opened()
    jobs.write("a", JobWrite(job_id, 1, {event(1): b"one", event(2): b"two", event(3): b"three"}))
    assert not jobs.write("a", JobWrite(job_id, 1, {event(5): b"five"})), "events have no gaps"
    jobs.acknowledge(job_id, 2)
    jobs.acknowledge(job_id, 1)
    assert set(jobs.kept.entries[job_id]) == {BODY, event(3)}
    assert jobs.registry.events_after(job_id, "", 2, 100) == [event(3)]
    with pytest.raises(EventsAcknowledged, match="events up to 2 were acknowledged"):
        jobs.registry.events_after(job_id, "", 1, 100)
    with pytest.raises(EventUnknown, match="the last event is 3"):
        jobs.acknowledge(job_id, 4)
    with pytest.raises(EventUnknown, match="the last event is 3"):
        jobs.registry.events_after(job_id, "", 4, 100)


def test_a_page_of_events_has_at_least_one_and_no_more_than_its_bytes() -> None:
    jobs, job_id = opened()
    jobs.write("a", JobWrite(job_id, 1, {event(1): b"x" * 50, event(2): b"x" * 10, event(3): b"x" * 10}))
    assert jobs.registry.events_after(job_id, "", 0, 20) == [event(1)]
    assert jobs.registry.events_after(job_id, "", 1, 20) == [event(2), event(3)]
    assert jobs.registry.events_after(job_id, "", 3, 20) == []


def test_jobs_that_a_replica_gives_up_wait_for_another_one() -> None:
    jobs, job_id = opened()
    jobs.commit(jobs.registry.release("b", [job_id]))
    assert jobs.kept.records[job_id].state == "running", "it is not that replica's"
    jobs.commit(jobs.registry.release("a", [job_id]))
    assert jobs.kept.records[job_id].state == "waiting"


def test_a_deleted_job_is_lost_to_its_replica_and_its_key_is_free() -> None:
    jobs, job_id = opened()
    jobs.delete(job_id)
    assert jobs.registry.poll("a", [job_id], jobs.now).lost == [job_id]
    assert not jobs.write("a", JobWrite(job_id, 1, {event(1): b"x"}))
    assert (jobs.registry.total_bytes, jobs.registry.records("")) == (0, [])
    assert jobs.open(asked()).record.job_id != job_id


def test_what_is_kept_is_bounded() -> None:
    jobs = TimedJobs()
    jobs.open(asked(key="1"), b"x" * (2 * BYTES_PER_JOB - 10))
    with pytest.raises(
        JobsFull, match=r"of all callers take 196598 bytes and jobs\.max_bytes allows 196608; acknowledge or delete"
    ):
        jobs.open(asked(key="2"), b"")
    assert jobs.open(asked(key="1"), b"").claim is None, "a known key needs no room"
    full = TimedJobs()
    for key in "123":
        full.open(asked(key=key), b"")
    with pytest.raises(JobsFull):
        full.open(asked(key="4"), b"")


def test_one_caller_takes_at_most_its_share_of_what_is_kept() -> None:
    jobs = TimedJobs(JobsSettings(max_bytes=4 * BYTES_PER_JOB, max_share=0.5))
    jobs.open(asked(key="1", namespace="team"), b"x" * 40)
    with pytest.raises(
        JobsFull, match=r"this caller take 65576 bytes and jobs\.max_bytes x jobs\.max_share \(0\.5\) allows 131072"
    ):
        jobs.open(asked(key="2", namespace="team"), b"")
    for key in "12":
        jobs.open(asked(key=key, namespace="others"), b"")


def test_what_was_refused_leaves_no_key_and_only_its_owner_refuses_it() -> None:
    jobs = TimedJobs()
    for _ in range(5):
        job_id = jobs.open(asked(), b"x" * 90).record.job_id
        refusal = JobWrite(job_id, 1, ended="refused")
        assert not jobs.write("b", refusal)
        assert jobs.write("a", refusal)
        with pytest.raises(JobUnknown, match="it was refused or deleted"):
            jobs.registry.record(job_id, "")
    assert (jobs.registry.records(""), jobs.registry.total_bytes, jobs.kept.records) == ([], 0, {})


class DyingReplicas(RuleBasedStateMachine):
    """Replicas play jobs, fall silent and come back, and the store dies, in any order.

    Each job has as many events as `EVENTS`; what a replica writes names its job and its number. So a job that was
    played twice, or whose owner went on after it was replaced, shows as an event that changed or came twice.
    """

    EVENTS = 4
    OWNERS = ("a", "b", "c")

    def __init__(self) -> None:
        super().__init__()
        self.timed = TimedJobs(JobsSettings(lease_s=5, keep_s=10**6))
        self.playing: dict[str, dict[str, Claim]] = {owner: {} for owner in self.OWNERS}
        """What each replica believes that it plays, whether that is still so or not."""
        self.written: dict[str, list[int]] = {}
        """Events that the store accepted, by job."""
        self.jobs: dict[str, str] = {}
        """By key."""
        self.claims: list[Claim] = []
        """All that were ever given."""

    @rule(owner=st.sampled_from(OWNERS), key=st.sampled_from("xyz"))
    def post(self, owner: str, key: str) -> None:
        opened = self.timed.open(asked(key=key, owner=owner))
        assert self.jobs.setdefault(key, opened.record.job_id) == opened.record.job_id, "a second run"
        if opened.claim is not None:
            self.note_claim(owner, opened.claim)

    def note_claim(self, owner: str, claim: Claim) -> None:
        self.playing[owner][claim.record.job_id] = claim
        self.claims.append(claim)

    @rule(owner=st.sampled_from(OWNERS))
    def take_orders(self, owner: str) -> None:
        commands = self.timed.registry.poll(owner, list(self.playing[owner]), self.timed.now)
        for job_id in commands.lost:
            del self.playing[owner][job_id]
        for job_id in commands.waiting:
            if (claim := self.timed.claim(job_id, owner)) is not None:
                self.note_claim(owner, claim)

    @precondition(lambda self: self.claims)
    @rule(data=st.data())
    def write_late(self, data: st.DataObject) -> None:
        """By a replica that does not know what has happened since it got the job."""
        claim = data.draw(st.sampled_from(self.claims))
        record = self.timed.kept.records[claim.record.job_id]
        is_owner = (claim.record.owner, claim.record.epoch) == (record.owner, record.epoch)
        assert self.timed.write(claim.record.owner, JobWrite(record.job_id, claim.record.epoch)) == is_owner

    @precondition(lambda self: any(self.playing.values()))
    @rule(data=st.data(), owner=st.sampled_from(OWNERS), is_repeated=st.booleans())
    def play(self, data: st.DataObject, owner: str, is_repeated: bool) -> None:
        """Writes the event that the replica believes to be the next, maybe twice."""
        if not (mine := self.playing[owner]):
            return
        job_id = data.draw(st.sampled_from(sorted(mine)))
        claim = mine[job_id]
        number = claim.record.last_event + 1
        if number > self.EVENTS:
            return
        ended = "completed" if number == self.EVENTS else None
        write = JobWrite(job_id, claim.record.epoch, {event(number): b"%d" % number}, ended=ended)  # type: ignore[arg-type]
        if self.timed.write(owner, write):
            self.written.setdefault(job_id, []).append(number)
            mine[job_id] = replace(claim, record=replace(claim.record, last_event=number))
            if is_repeated:
                assert self.timed.write(owner, write)
        else:
            del mine[job_id]

    @rule(seconds=st.sampled_from([0.5, 3, 6, 9]))
    def wait(self, seconds: float) -> None:
        self.timed.wait(seconds)

    @rule(owner=st.sampled_from(OWNERS))
    def die(self, owner: str) -> None:
        self.playing[owner] = {}

    @rule()
    def store_dies(self) -> None:
        self.timed.restart()

    @invariant()
    def every_event_was_accepted_once_and_in_order(self) -> None:
        for job_id, numbers in self.written.items():
            assert numbers == list(range(1, len(numbers) + 1))
            entries = self.timed.kept.entries[job_id]
            assert [entries[event(number)] for number in numbers] == [b"%d" % number for number in numbers]

    @invariant()
    def at_most_one_replica_may_write_to_a_job(self) -> None:
        for job_id, record in self.timed.kept.records.items():
            holders = [
                owner
                for owner, mine in self.playing.items()
                if job_id in mine and (owner, mine[job_id].record.epoch) == (record.owner, record.epoch)
            ]
            assert len(holders) <= 1

    def teardown(self) -> None:
        """Whatever has happened, a replica that lives ends every job."""
        for _ in range(2):
            self.timed.wait(6)
            for key in self.jobs:
                self.post("a", key)
            self.take_orders("a")
        for job_id, claim in self.playing["a"].items():
            for number in range(claim.record.last_event + 1, self.EVENTS + 1):
                ended = "completed" if number == self.EVENTS else None
                write = JobWrite(job_id, claim.record.epoch, {event(number): b"%d" % number}, ended=ended)  # type: ignore[arg-type]
                assert self.timed.write("a", write)
        assert {self.timed.kept.records[job_id].state for job_id in self.jobs.values()} <= {"completed"}
        assert all(self.timed.kept.records[job_id].last_event == self.EVENTS for job_id in self.jobs.values())


TestDyingReplicas = DyingReplicas.TestCase
TestDyingReplicas.settings = settings(stateful_step_count=40)
