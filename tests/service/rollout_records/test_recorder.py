"""The story in a record: times and priority; and what waits for the store."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from deployments.protocols.generation import Generation
from deployments.rollout_records.book import KeptRecord, RolloutRecordsSettings
from deployments.rollout_records.store import RolloutRecordStore
from rollout_client.contract.records import RolloutRecord
from service.access.keys import ANYBODY
from service.rollout_records.recorder import RolloutRecorder
from service.rollouts.episode import Episode
from service.rollouts.episode_records import PlayedStep
from service.rollouts.retries import _Retry
from tests import virtual_time
from tests.service.scripted import EpisodeRecipe, ids_of, outcome


def played(*parts: tuple[str, float], retries: Sequence[_Retry] = (), steps: Sequence[PlayedStep] = ()) -> Episode:
    """An episode of one generation a part, its replica and when it began. All but the last one are interrupted."""
    episode = EpisodeRecipe().make()
    for place, (replica, began_at) in enumerate(parts):
        reason: Any = "stop" if place == len(parts) - 1 else "abort"
        made = Generation(ids_of("AB"), [-1.0, -1.0], reason, replica=replica, began_at=began_at, took_s=1.0)
        episode.add_generation(made)
    episode.retries.noted.extend(retries)
    episode.steps.extend(steps)
    episode.add_outcome(outcome(reward=1.0, terminated=True))
    return episode


async def recorded(episode: Episode) -> RolloutRecord:
    """The record that `RolloutRecorder` writes of the episode."""
    store: Any = RolloutRecordStore(RolloutRecordsSettings(), lambda: 90.0)
    recorder = RolloutRecorder(store, time_s=lambda: 90.0)
    recorder.note(episode, episode.result())
    await virtual_time.settled()
    return await recorder.record("request-0-0", ANYBODY)


def test_a_rollout_that_goes_on_began_with_its_first_generation() -> None:
    episode = played(("a", 50.0))
    episode.began_at = 60.0
    assert asyncio.run(recorded(episode)).began_at == 50.0
    unknown = played(("a", 0.0))
    unknown.began_at = 60.0
    record = asyncio.run(recorded(unknown))
    assert (record.began_at, record.generations[0].began_at) == (60.0, None)


def test_the_priority_is_that_of_the_requests_share() -> None:
    episode = played(("a", 50.0))
    for weight, name in ((16.0, "interactive"), (2.5, "other")):
        episode.start = replace(episode.start, share=replace(episode.start.share, weight=weight))
        assert asyncio.run(recorded(episode)).priority == name


class AwayStore:
    """Takes nothing until it is back."""

    def __init__(self) -> None:
        self.is_back = asyncio.Event()
        self.taken: list[KeptRecord] = []

    async def keep(self, records: Sequence[KeptRecord]) -> None:
        await self.is_back.wait()
        self.taken += records


def long_episode(number: int) -> Episode:
    episode = EpisodeRecipe(max_seq_len=100_000, position=number).make()
    episode.add_generation(Generation(ids_of("A" * 2000), [-1.0] * 2000, "stop", replica="a"))
    return episode


async def test_records_that_wait_for_a_lost_store_take_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    store: Any = AwayStore()
    dropped, most = CountedUp(), 2**20
    monkeypatch.setattr("service.rollout_records.recorder.metrics.Counter", lambda *_, **__: dropped)
    recorder = RolloutRecorder(store, most_held_bytes=most)
    for number in range(500):
        episode = long_episode(number)
        recorder.note(episode, episode.result())
        if number % 50 == 0:
            await asyncio.sleep(0)
    store.is_back.set()
    await asyncio.sleep(0.1)
    # The first ones were kept.
    names = [record.rollout_id for record in store.taken]
    assert names == [f"request-{number}-0" for number in range(len(names))]
    assert sum(record.size for record in store.taken) <= most
    assert dropped.count == 500 - len(names)
    assert 0 < len(names) < 250
    # Further ones are kept again.
    recorder.note(long_episode(501), long_episode(501).result())
    await asyncio.sleep(0.1)
    assert [record.rollout_id for record in store.taken[len(names) :]] == ["request-501-0"]


class CountedUp:
    def __init__(self) -> None:
        self.count = 0

    def inc(self, value: int = 1) -> None:
        self.count += value


async def test_a_record_larger_than_the_bound_waits_alone() -> None:
    store: Any = AwayStore()
    recorder = RolloutRecorder(store, most_held_bytes=1)
    for number in range(2):
        recorder.note(long_episode(number), long_episode(number).result())
    store.is_back.set()
    await asyncio.sleep(0.1)
    assert [record.rollout_id for record in store.taken] == ["request-0-0"]
