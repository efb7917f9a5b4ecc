"""Ends of the rollouts of a job: counted and recorded once each, by their delivery, whichever processes play them."""

import asyncio
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.rollout_records.book import RolloutRecordsSettings
from deployments.rollout_records.store import RolloutRecordStore
from rollout_client.contract.rollouts import SampleResult
from service.rollouts.episode import Episode
from service.rollouts.progress import RolloutObserver, Stage
from tests import virtual_time
from tests.service.jobs.scripted_ingresses import ScriptedIngresses, request_of
from tests.service.scripted import ScriptedEnvironment, ScriptedGenerator, outcome

Rollout = tuple[int, int]
"""The index of its sample, and its number in the group."""


class CountingObserver(RolloutObserver):
    def __init__(self) -> None:
        self.ended_rollouts: Counter[Rollout] = Counter()
        self.played: Counter[Rollout] = Counter()

    def during(self, stage: Stage, episode: Episode) -> AbstractContextManager[object]:
        self.played[episode.identity.idx, episode.identity.generation_index] += stage == "rollout"
        return nullcontext()

    def ended(self, result: SampleResult, staleness: int | None) -> None:
        del staleness
        self.ended_rollouts[result.idx, result.generation_index] += 1


class CountedIngresses(ScriptedIngresses):
    """Ingresses whose observer counts, with records of rollouts."""

    def __init__(self, **options: Any) -> None:
        self.observed = CountingObserver()
        store = RolloutRecordStore(RolloutRecordsSettings(), virtual_time.now)
        super().__init__(observer=self.observed, records=store, **options)

    async def delivered(self, job_id: str) -> list[dict[str, Any]]:
        return [each["sample"] for each in await self.samples(job_id)]

    async def recorded(self) -> list[str]:
        return sorted(record["rollout_id"] for record in await self.records.newest("", 1000))


def names(samples: list[dict[str, Any]]) -> list[Rollout]:
    return [(sample["idx"], sample["generation_index"]) for sample in samples]


@settings(max_examples=8, deadline=None)
@given(kills_after_s=st.lists(st.sampled_from([0.5, 1, 1.5, 2, 4, 7]), max_size=3))
@virtual_time.synchronous
async def test_each_end_is_counted_and_recorded_once_whatever_dies(kills_after_s: list[float]) -> None:
    cluster = CountedIngresses()
    job_id = await cluster.submit(request_of(groups=4, max_rollout_turns=6))
    for seconds in kills_after_s:
        await asyncio.sleep(seconds)
        playing = [place for place, replica in enumerate(cluster.replicas) if replica.jobs.playing]
        cluster.kill(playing[0] if playing else 0)
    await cluster.ended(job_id)
    await asyncio.sleep(1)
    samples = await cluster.delivered(job_id)
    assert len(samples) == 8
    assert cluster.observed.ended_rollouts == Counter(names(samples))
    assert await cluster.recorded() == sorted(sample["rollout_id"] for sample in samples)


async def test_a_rollout_that_was_delivered_is_not_played_again() -> None:
    cluster = CountedIngresses()
    job_id = await cluster.submit(request_of(groups=8, max_rollout_turns=6))
    while len(before := await cluster.delivered(job_id)) < 8:
        await asyncio.sleep(0.25)
    cluster.kill(0)
    await cluster.ended(job_id)
    assert {cluster.observed.played[rollout] for rollout in names(before)} == {1}


async def test_an_end_is_noted_when_its_group_is_delivered() -> None:
    generator = ScriptedGenerator(["abc"], delay_of=lambda request: 30 if request.rollout_id.endswith("-1") else 10)
    cluster = CountedIngresses(generator=generator, environment=ScriptedEnvironment([outcome(terminated=True)]))
    job_id = await cluster.submit(request_of(groups=1))
    begun = virtual_time.now()
    await asyncio.sleep(20)
    assert (cluster.observed.ended_rollouts.total(), await cluster.recorded()) == (0, [])
    await cluster.ended(job_id)
    assert cluster.observed.ended_rollouts == {(0, 0): 1, (0, 1): 1}
    ended_at = sorted(record["ended_at"] - begun for record in await cluster.records.newest("", 2))
    assert [round(seconds) for seconds in ended_at] == [10, 30]
