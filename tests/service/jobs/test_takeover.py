"""Ingress replicas and stores that die at any moment: every rollout ends as if nothing had happened."""

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Any, TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.protocols.environments import StepRequest, TaskDescription
from deployments.storage.storage import StorageFailed, StoreReplaced
from rollout_env import StepOutcome
from service.settings import AdmissionSettings
from tests import virtual_time
from tests.service.jobs.scripted_ingresses import (
    ENDS_WITHIN_S,
    SETTINGS,
    ScriptedIngresses,
    request_of,
    run,
    slow_cluster,
)
from tests.service.rollouts.playing import RandomEnvironment
from tests.service.scripted import outcome, without_names

REQUEST = request_of(groups=3, max_rollout_turns=6)
LONG = request_of(groups=1, num_generations=1, deadline_s=28, max_rollout_turns=50)
deaths = st.lists(
    st.tuples(st.sampled_from([0.5, 1, 2, 3, 7]), st.sampled_from(["ingress", "store"])), min_size=1, max_size=6
)


Undisturbed: TypeAlias = tuple[list[dict[str, Any]], dict[str, Any], int]


@pytest.fixture(scope="module")
def undisturbed() -> Undisturbed:
    """The rollouts, the metrics, and how many generations they took."""

    async def scenario() -> Undisturbed:
        cluster = ScriptedIngresses()
        answer = (await cluster.post(0, REQUEST, idempotency_key="k")).json()
        return without_names(answer["samples"]), comparable(answer["metrics"]), len(cluster.generator.requests)

    played: Undisturbed = run(scenario)
    return played


def comparable(metrics: dict[str, Any]) -> dict[str, Any]:
    """Without the order in which rollouts ended."""
    return {name: sorted(value) if isinstance(value, list) else value for name, value in metrics.items()}


async def playing(after_s: float, **headers: str) -> tuple[ScriptedIngresses, str]:
    """Ingresses that have played a job for so long, and its id."""
    cluster = ScriptedIngresses()
    job_id = await cluster.submit(REQUEST, **headers)
    await asyncio.sleep(after_s)
    return cluster, job_id


@pytest.mark.slow
@given(deaths)
@settings(max_examples=20)
@virtual_time.synchronous
async def test_after_any_deaths_the_answer_is_that_of_an_undisturbed_run(
    undisturbed: Undisturbed, deaths: list[tuple[float, str]]
) -> None:
    cluster = ScriptedIngresses()
    job_id = await cluster.submit(REQUEST, idempotency_key="k")
    killed = 0
    for after_s, what in deaths:
        await asyncio.sleep(after_s)
        if what == "store":
            cluster.store_is_away = True
            await asyncio.sleep(1)
            cluster.start_store()
        else:
            playing = [place for place, replica in enumerate(cluster.replicas) if replica.jobs.playing]
            cluster.kill(playing[0] if playing else 0)
            killed += bool(playing)
    assert (await cluster.ended(job_id))["state"] == "completed"
    answer = (await cluster.post(1, REQUEST, idempotency_key="k")).json()
    samples, metrics, generations = undisturbed
    assert without_names(answer["samples"]) == samples
    assert comparable(answer["metrics"]) == metrics
    played = cluster.generator.requests
    assert len(played) <= generations + killed * len(samples)
    turns = Counter((request.generation_id.split("-")[2], request.turn) for request in played)
    assert max(turns.values()) <= 1 + killed


@pytest.mark.parametrize("path", ["/jobs", "/rollout"])
async def test_a_job_whose_opening_was_stored_and_not_answered_is_played(path: str, undisturbed: Undisturbed) -> None:
    cluster = ScriptedIngresses()
    cluster.dies_after = "open"
    assert (await cluster.post(0, REQUEST, path=path, idempotency_key="k")).status_code == 503
    async with asyncio.timeout(ENDS_WITHIN_S):
        again = await cluster.post(0, REQUEST, idempotency_key="k")
    assert (again.status_code, without_names(again.json()["samples"])) == (200, undisturbed[0])
    assert len(await cluster.all_jobs()) == 1


@pytest.mark.parametrize(
    ("broken", "how"),
    [
        ("dies_after", "claim"),
        ("away_after", "claim"),
        ("read_errors", [StorageFailed("away")]),
        ("read_errors", [StoreReplaced("by another")]),
    ],
)
async def test_a_job_ends_whatever_breaks_while_it_is_taken_over(broken: str, how: Any) -> None:
    cluster, job_id = await playing(1)
    setattr(cluster.storage if broken == "read_errors" else cluster, broken, how)
    cluster.kill(0)
    assert (await cluster.ended(job_id))["state"] == "completed"
    assert sorted(each["position"] for each in await cluster.samples(job_id)) == list(range(6))


async def test_a_failing_database_costs_no_rollout_once_it_is_back(undisturbed: Undisturbed) -> None:
    cluster, job_id = await playing(1, idempotency_key="k")
    cluster.storage.is_failing = True
    refused = await cluster.post(1, REQUEST, path="/jobs")
    assert (refused.status_code, refused.json()["type"]) == (503, "urn:rollout:problem:not-ready")
    assert (await cluster.request(0, "GET", f"/jobs/{job_id}")).json()["state"] == "running"
    await asyncio.sleep(60)
    cluster.storage.is_failing = False
    await cluster.ended(job_id)
    assert without_names((await cluster.post(1, REQUEST, idempotency_key="k")).json()["samples"]) == undisturbed[0]


async def test_events_of_a_database_that_fails_are_refused_within_seconds() -> None:
    cluster = ScriptedIngresses()
    job_id = await cluster.submit(REQUEST)
    await cluster.ended(job_id)
    cluster.storage.is_failing = True
    asked_at = virtual_time.now()
    refused = await cluster.request(1, "GET", f"/jobs/{job_id}/events")
    assert (refused.status_code, refused.json()["type"]) == (503, "urn:rollout:problem:not-ready")
    assert refused.headers["retry-after"] == "2"
    assert virtual_time.now() - asked_at == pytest.approx(5, abs=0.1)
    cluster.storage.is_failing = False
    assert len(await cluster.events(job_id)) == 4


def test_seeded_rollouts_go_on_with_the_seeds_of_their_turns() -> None:
    async def seeds(is_killed: bool) -> set[tuple[str, int, int | None]]:
        cluster = ScriptedIngresses()
        job_id = await cluster.submit({**REQUEST, "sampling": {"max_new_tokens": 6, "seed": 7}})
        await asyncio.sleep(4)
        if is_killed:
            cluster.kill(0)
        await cluster.ended(job_id)
        played = cluster.generator.requests
        return {(request.generation_id.split("-")[2], request.turn, request.sampling.seed) for request in played}

    assert run(lambda: seeds(is_killed=True)) == run(lambda: seeds(is_killed=False))


async def test_a_start_is_made_once_whoever_goes_on() -> None:
    class StartedEnvironment(RandomEnvironment):
        """Its starts differ, as those of a game with its own dice do."""

        starts = 0

        async def describe(self) -> TaskDescription:
            return replace(await super().describe(), has_start=True)

        async def start(self, request: StepRequest) -> StepOutcome:
            self.starts += 1
            return outcome("x" * self.starts)

    cluster = ScriptedIngresses(environment=(environment := StartedEnvironment()))
    job_id = await cluster.submit(REQUEST)
    await asyncio.sleep(2)
    before = environment.starts
    cluster.kill(0)
    await cluster.ended(job_id)
    assert (before, environment.starts) == (3, 3)


async def test_a_job_that_is_taken_over_waits_for_room_without_its_deadline() -> None:
    cluster = slow_cluster(10, outcome("x"), replicas=1, admission=AdmissionSettings(max_rollouts=1))
    job_id = await cluster.submit(LONG)
    await asyncio.sleep(20)
    cluster.kill(0)
    await cluster.post(0, {**LONG, "deadline_s": 100})
    has_room_at = virtual_time.now()
    assert has_room_at > 20 + SETTINGS.lease_s + 20
    assert (await cluster.ended(job_id))["ended_at"] == pytest.approx(has_room_at + 28, abs=2)


async def test_a_replica_that_shuts_down_hands_its_jobs_over_at_once() -> None:
    cluster, job_id = await playing(2)
    await cluster.replicas[0].jobs.close()
    await asyncio.sleep(0.1)
    assert cluster.replicas[1].jobs.playing == [job_id]
    await cluster.ended(job_id)


async def test_a_replica_that_is_shut_down_while_the_store_is_away_loses_nothing(undisturbed: Undisturbed) -> None:
    cluster, job_id = await playing(2, idempotency_key="k")
    cluster.store_is_away = True
    await cluster.replicas[0].jobs.close()
    cluster.start_store()
    await asyncio.sleep(SETTINGS.lease_s + 2)
    assert cluster.replicas[1].jobs.playing == [job_id]
    await cluster.ended(job_id)
    assert without_names((await cluster.post(1, REQUEST, idempotency_key="k")).json()["samples"]) == undisturbed[0]


async def test_a_replica_that_was_only_slow_stops_playing_what_it_has_lost() -> None:
    cluster, job_id = await playing(1)
    slow = cluster.replicas[0]
    slow.link.is_cut = True
    await asyncio.sleep(8)
    slow.link.restore()
    await asyncio.sleep(1)
    assert slow.jobs.playing == []
    await cluster.ended(job_id)
    assert (await cluster.events(job_id, replica=1))[-1]["summary"]


async def test_early_stopping_counts_the_rollouts_that_ended_before_the_death() -> None:
    cluster = ScriptedIngresses()
    job_id = await cluster.submit({**REQUEST, "num_generations": 1, "keep": {"groups": 2}})
    await asyncio.sleep(6)
    cluster.kill(0)
    await cluster.ended(job_id)
    statuses = [each["sample"]["status"] for each in await cluster.samples(job_id)]
    assert (len(statuses), statuses.count("cancelled") <= 1) == (3, True)
