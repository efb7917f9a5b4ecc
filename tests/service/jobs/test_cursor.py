"""Jobs over a data set: whatever dies, and whichever checkpoint is taken, each sample is trained on once."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.data.rows import DataReader
from deployments.failures import EnvironmentBroken
from deployments.protocols.environments import StepRequest
from rollout_client import RequestRejected
from rollout_client.calls.async_client.jobs import AsyncJobs
from rollout_client.contract.jobs import JobCursor, JobEvent
from rollout_client.contract.selection import SampleRange
from rollout_env import StepOutcome
from service.jobs.codec import PLAYED, _ranges_without, cursor_of, ranges_entry
from service.rollout_requests.sample_ranges import pieces_of
from tests import virtual_time
from tests.service.jobs.scripted_ingresses import ENDS_WITHIN_S, ScriptedIngresses, request_of
from tests.service.rollouts.playing import RandomEnvironment

FIRST, COUNT = 5, 8
RANGE = {"task_name": "task", "start": FIRST, "count": COUNT, "seed": 3}
OPTIONS: dict[str, Any] = {"num_generations": 2, "sampling": {"max_new_tokens": 6}, "max_rollout_turns": 5}


class Rows(DataReader):
    """The sample of a place is named after it."""

    def __init__(self) -> None:
        self.version = 1

    async def revision(self, wanted: SampleRange) -> str:
        return f"{self.version} with seed {wanted.seed}"

    async def sizes(self) -> dict[str, dict[str, int]]:
        return {"task": {"train": 1000}}

    async def samples(self, wanted: SampleRange, most_bytes: int) -> AsyncGenerator[bytes, None]:
        for place in range(wanted.start, wanted.end):
            prompt = {"role": "user", "content": "q" * (1 + place % 4)}
            sample = {"id": f"s{place}", "task_name": "task", "messages": [prompt], "extra_env_info": {"place": place}}
            yield json.dumps(sample).encode() + b"\n"


class FlakyEnvironment(RandomEnvironment):
    """Fails at the first step of some samples, so many times: a group of two rollouts, two groups, half of a group."""

    def __init__(self, failures: Mapping[int, int]) -> None:
        super().__init__()
        self._failures = Counter(failures)

    async def step(self, request: StepRequest) -> StepOutcome:
        place: Any = request.extra_env_info.get("place")
        if self._failures[place] > 0:
            self._failures[place] -= 1
            raise EnvironmentBroken("It fails.")
        return await super().step(request)


class Trainer:
    """Trains on one event of its job after the other; what it has learned since its checkpoint dies with it."""

    def __init__(self, cluster: ScriptedIngresses, cursor: JobCursor) -> None:
        self._cluster = cluster
        self.cursor: JobCursor | None = cursor
        """`None` when nothing is left."""
        self.trained: list[str] = []
        self._checkpoints = [(cursor, self.trained)]

    @property
    def _jobs(self) -> AsyncJobs:
        """Those of the ingress replica that runs now: a client of one that was killed waits forever."""
        return self._cluster.client(0).jobs

    async def train(self, events: int) -> None:
        for _ in range(events):
            if self.cursor is None:
                return
            query = {"after": self.cursor.event, "follow": False}
            answer = await self._cluster.request(0, "GET", f"/jobs/{self.cursor.job_id}/events", params=query)
            if answer.status_code == 404:
                await self.restart(-1)
            elif not answer.text.strip():
                await asyncio.sleep(1)
            else:
                await self._learn(JobEvent.model_validate_json(answer.text.splitlines()[0]), self.cursor)

    async def _learn(self, event: JobEvent, cursor: JobCursor) -> None:
        self.trained = [*self.trained, *{str(each.sample.id) for each in event.samples if each.sample.status in PLAYED}]
        self.cursor = cursor.model_copy(update={"event": event.event})
        if event.is_last:
            # What has failed is asked for again.
            await self.save(acknowledges=False)
            await self.restart(-1)

    async def save(self, acknowledges: bool) -> None:
        if self.cursor is None:
            return
        try:
            self.cursor = await self._jobs.cursor(self.cursor.job_id, self.cursor.event)
        except RequestRejected:
            # The job is not known any longer.
            await self.restart(-1)
            return
        self._checkpoints.append((self.cursor, self.trained))
        if acknowledges:
            await self._jobs.acknowledge(self.cursor.job_id, self.cursor.event)

    async def restart(self, checkpoint: int) -> None:
        saved, self.trained = self._checkpoints[checkpoint % len(self._checkpoints)]
        self.cursor = await self._jobs.resume(saved, **OPTIONS)


@pytest.mark.slow
@given(
    st.lists(
        st.tuples(st.just("train"), st.integers(1, 6))
        | st.tuples(st.just("save"), st.booleans())
        | st.tuples(st.just("restart"), st.integers(-3, -1))
        | st.tuples(st.sampled_from(["ingress", "store", "forget"]), st.none()),
        max_size=10,
    )
)
@settings(max_examples=8)
@virtual_time.synchronous
async def test_each_sample_is_trained_on_once_whatever_dies(happenings: list[tuple[str, Any]]) -> None:
    cluster = ScriptedIngresses(data=Rows(), environment=FlakyEnvironment({FIRST + 1: 2, FIRST + 3: 4, FIRST + 6: 1}))
    job = await cluster.client(0).jobs.submit(samples_from=[RANGE], **OPTIONS)
    trainer = Trainer(cluster, await cluster.client(1).jobs.cursor(job.job_id, 0))
    for what, argument in happenings:
        match what:
            case "ingress":
                cluster.kill(0)
            case "store":
                cluster.start_store()
            case "forget" if trainer.cursor is not None:
                # As after its expiry, or with a cluster whose jobs did not outlive it.
                await cluster.request(1, "DELETE", f"/jobs/{trainer.cursor.job_id}")
            case "train" | "save" | "restart":
                await getattr(trainer, what)(argument)
    async with asyncio.timeout(ENDS_WITHIN_S):
        while trainer.cursor is not None:
            await trainer.train(1)
    assert sorted(trainer.trained) == sorted(f"s{place}" for place in range(FIRST, FIRST + COUNT))


async def test_a_cursor_names_what_is_left_and_posted_it_plays_that_alone() -> None:
    cluster = ScriptedIngresses(data=Rows())
    jobs = cluster.client(0).jobs
    job = await jobs.submit(samples_from=[RANGE], **OPTIONS)
    await cluster.ended(job.job_id)
    events = await cluster.events(job.job_id)
    await jobs.acknowledge(job.job_id, 3)
    cursor = await jobs.cursor(job.job_id, 3)
    assert (cursor.job_id, cursor.event, cursor.samples_left) == (job.job_id, 3, COUNT - 3)
    left = {each["sample"]["id"] for event in events[3:-1] for each in event["samples"]}
    rest = await cluster.client(1).rollout(samples_from=cursor.samples_from)
    assert [sample.id for sample in rest.samples] == sorted(left, key=lambda name: int(name[1:]))
    [following] = rest.next_samples_from
    assert following.model_dump(exclude_none=True, exclude={"without"}) == {
        **RANGE,
        "start": FIRST + COUNT,
        "revision": "1 with seed 3",
    }
    at_end = await jobs.cursor(job.job_id, COUNT + 1)
    assert at_end.samples_left == 0
    assert await jobs.resume(at_end) is None


async def test_a_cursor_leaves_the_samples_whose_groups_have_failed() -> None:
    failing = {FIRST + 1: 2, FIRST + 2: 2, FIRST + 4: 1, FIRST + 6: 2}
    cluster = ScriptedIngresses(data=Rows(), environment=FlakyEnvironment(failing))
    jobs = cluster.client(0).jobs
    job = await jobs.submit(samples_from=[RANGE], **OPTIONS)
    await cluster.ended(job.job_id)
    await jobs.acknowledge(job.job_id, COUNT)
    cursor = await jobs.cursor(job.job_id, COUNT + 1)
    assert (cursor.samples_left, (await jobs.cursor(job.job_id, 0)).samples_left) == (3, COUNT)
    [left] = cursor.samples_from
    assert [(piece.start, piece.count) for piece in pieces_of(left)] == [(FIRST + 1, 2), (FIRST + 6, 1)]
    assert (left.seed, left.revision) == (3, "1 with seed 3")


async def test_a_cursor_of_other_data_begins_no_job_and_says_so() -> None:
    data = Rows()
    cluster = ScriptedIngresses(data=data)
    jobs = cluster.client(0).jobs
    job = await jobs.submit(samples_from=[RANGE], **OPTIONS)
    await cluster.ended(job.job_id)
    cursor = await jobs.cursor(job.job_id, 3)
    data.version = 2
    assert await jobs.resume(cursor, **OPTIONS) == cursor, "the job is there, and needs no data any longer"
    await jobs.delete(job.job_id)
    with pytest.raises(RequestRejected, match=r"samples_from\[0\]\.revision: the data of task 'task'"):
        await jobs.resume(cursor, **OPTIONS)
    assert await jobs.all() == []
    data.version = 1
    assert (await jobs.resume(cursor, **OPTIONS)) is not None


async def test_a_job_whose_data_have_changed_fails() -> None:
    data = Rows()
    cluster = ScriptedIngresses(data=data)
    job = await cluster.client(0).jobs.submit(samples_from=[RANGE], **OPTIONS)
    await asyncio.sleep(1)
    data.version = 2
    cluster.kill(0)
    assert (await cluster.ended(job.job_id))["state"] == "failed"
    assert (await cluster.events(job.job_id))[-1]["problem"]["errors"][0]["field"] == "samples_from[0].revision"


async def test_a_job_of_posted_samples_has_no_cursor() -> None:
    cluster = ScriptedIngresses(data=Rows())
    job = (await cluster.post(0, request_of(), path="/jobs")).json()
    refused = await cluster.request(1, "GET", f"/jobs/{job['job_id']}/cursor", params={"after": 0})
    assert (refused.status_code, refused.json()["type"]) == (422, "urn:rollout:problem:job-without-data-set")
    unknown = await cluster.request(1, "GET", f"/jobs/{job['job_id']}/cursor", params={"after": 99})
    assert (unknown.status_code, unknown.json()["errors"][0]["field"]) == (422, "after")


ranges_with_holes = st.lists(
    st.tuples(st.integers(0, 30), st.lists(st.booleans(), min_size=1, max_size=12)), min_size=1, max_size=3
)


@given(ranges_with_holes, st.data())
def test_the_delivered_and_the_left_are_the_whole(drawn: list[tuple[int, list[bool]]], data: st.DataObject) -> None:
    ranges = [SampleRange(task_name="t", start=start, count=len(holes)) for start, holes in drawn]
    before = [place for place, is_hole in enumerate(hole for _, holes in drawn for hole in holes) if is_hole]
    with_holes = list(_ranges_without(ranges, before))
    places = places_of(with_holes)
    assert len(places) == sum(drawn.size for drawn in with_holes)
    groups = data.draw(st.lists(st.sampled_from(range(len(places))), unique=True) if places else st.just([]))
    ledger = {("ledger", 0): ranges_entry(with_holes)}
    ledger |= {("ledger", event): b"%d" % group for event, group in enumerate(groups, start=1)}
    cursor = cursor_of("j", len(groups), ledger)  # type: ignore[arg-type]
    assert sorted([*places_of(cursor.samples_from), *(places[group] for group in groups)]) == sorted(places)


def places_of(ranges: list[SampleRange]) -> list[tuple[int, int]]:
    """With the number of their range, in the order in which they are played."""
    return [
        (number, place)
        for number, drawn in enumerate(ranges)
        for piece in pieces_of(drawn)
        for place in range(piece.start, piece.end)
    ]
