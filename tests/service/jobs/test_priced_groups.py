"""A range of `num_generations` over HTTP, in virtual time: answers, streams, Arrow, the client, jobs and takeovers."""

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_client.arrow.schema import ARROW
from rollout_client.calls.arrow_bodies import read_response
from tests import virtual_time
from tests.service.jobs.scripted_ingresses import run
from tests.service.jobs.selected_groups import cluster
from tests.service.jobs.test_selected_groups import NDJSON, events_by
from tests.service.scripted import without_names

RANGE = {"min": 2, "max": 10, "confidence": 0.8, "width": 1}
TABLE = ["1000000000", "0010000000", "0000000000", "1111111111", "0000010000", "1111111011"]
SIZES = [2, 4, 8, 8, 6, 8]
"""Of their groups: waves of two, until some passed and some did not. After eight that are equal the interval at 0.8
ends at 0.17."""
PLAYED = [(place, index) for place, size in enumerate(SIZES) for index in range(size)]


def request_for(count: int = 6, **fields: Any) -> dict[str, Any]:
    return {"samples_from": [{"task_name": "task", "count": count}], "num_generations": RANGE, **fields}


def played_of(samples: Any) -> list[tuple[int, int]]:
    return [(sample["idx"], sample["generation_index"]) for sample in samples]


def answered(request: dict[str, Any], seed: int = 0, **headers: str) -> Any:
    async def post() -> Any:
        return await cluster(seed, table=TABLE).post(0, request, **headers)

    response = run(post)
    assert response.status_code == 200, response.text
    return response


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_each_group_has_as_many_rollouts_as_its_rewards_decide_however_long_they_take(seed: int) -> None:
    answer = answered(request_for(), seed).json()
    assert played_of(answer["samples"]) == PLAYED
    assert [sample["group_size"] for sample in answer["samples"]] == [SIZES[place] for place, _ in PLAYED]
    assert answer["groups"] == {"drawn": 6, "kept": 6, "dropped": {}, "ahead": 0, "rollouts": 36}
    assert answer["metrics"]["total_turns"] == 36
    assert answer["next_samples_from"] == [{"task_name": "task", "start": 6, "count": 6}]


def test_a_rollout_has_the_seed_of_its_index_in_whichever_wave_it_is_played() -> None:
    async def seeds(generations: Any) -> dict[str, int | None]:
        service = cluster(table=TABLE)
        await service.post(0, request_for(3, num_generations=generations, sampling={"seed": 7}))
        made: Any = service.generator
        return {call.rollout_id.split("-", 1)[1].split("-", 1)[1]: call.sampling.seed for call in made.requests}

    fixed, priced = run(lambda: seeds(10)), run(lambda: seeds(RANGE))
    assert len(fixed) == 30
    assert len(priced) == sum(SIZES[:3])
    assert priced.items() <= fixed.items()


def test_a_stream_has_each_group_whole_when_it_is_complete_and_arrow_has_the_same_rollouts() -> None:
    whole = answered(request_for()).json()
    *lines, summary = map(json.loads, filter(None, answered(request_for(), accept=NDJSON).text.splitlines()))
    groups = [line["position"] // 10 for line in lines]
    assert [group for place, group in enumerate(groups) if group not in groups[:place]] != list(range(6))
    assert all(
        groups[first : first + SIZES[group]] == [group] * SIZES[group]
        for group in range(6)
        for first in [groups.index(group)]
    )
    in_order = sorted(lines, key=lambda line: line["position"])
    assert without_names(line["sample"] for line in in_order) == without_names(whole["samples"])
    assert summary["summary"]["groups"] == whole["groups"]
    table = read_response(answered(request_for(), accept=ARROW).content)
    assert [(sample.idx, sample.generation_index, sample.group_size) for sample in table.samples] == [
        (place, index, SIZES[place]) for place, index in PLAYED
    ]


def test_with_keep_where_groups_are_judged_when_they_are_complete() -> None:
    keep = {"groups": 3, "where": {"reward_std": {"gt": 0}}, "draw_at_most": 6}
    answer = answered(request_for(1, keep=keep)).json()
    assert played_of(answer["samples"]) == [place for place in PLAYED if place[0] in (0, 1, 4)]
    groups = {name: answer["groups"][name] for name in ("drawn", "kept", "dropped", "rollouts")}
    assert groups == {"drawn": 5, "kept": 3, "dropped": {"reward_std.gt": 2}, "rollouts": 28}


def test_no_rollout_is_started_after_the_deadline() -> None:
    answer = answered(request_for(deadline_s=12)).json()
    sizes = [sum(sample["idx"] == place for sample in answer["samples"]) for place in range(6)]
    assert all(size <= complete for size, complete in zip(sizes, SIZES, strict=True))
    assert sizes != SIZES
    assert [sample["group_size"] for sample in answer["samples"]] == [
        sizes[sample["idx"]] for sample in answer["samples"]
    ]
    assert {sample["status"] for sample in answer["samples"]} == {"completed", "deadline"}


def test_the_client_reads_whole_answers_and_streams_of_groups_that_differ_in_size() -> None:
    async def scenario() -> tuple[Any, Any, int]:
        client, request = cluster(table=TABLE).client(0), request_for()
        played = await client.rollout(**request)
        async with client.stream(**request) as rollouts:
            streamed = {position: sample async for position, sample in rollouts.with_positions()}
        assert rollouts.summary.groups == played.groups
        in_order = [(streamed[place].idx, streamed[place].generation_index) for place in sorted(streamed)]
        return [(sample.idx, sample.generation_index) for sample in played.samples], in_order, rollouts.expected

    assert run(scenario) == (PLAYED, PLAYED, 60)


async def events_of_job(seed: int, request: dict[str, Any], kills_after_s: list[int]) -> list[dict[str, Any]]:
    service = cluster(seed, table=TABLE)
    job_id = (await service.post(0, request, "/jobs")).json()["job_id"]
    for seconds in kills_after_s:
        await asyncio.sleep(seconds)
        service.kill(0)
        service.kill(1)
    await service.ended(job_id)
    return await service.events(job_id)


@pytest.mark.parametrize("keep", [{}, {"groups": 3, "where": {"reward_std": {"gt": 0}}, "draw_at_most": 6}])
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 99), kills_after_s=st.lists(st.integers(1, 25), max_size=4))
def test_a_job_goes_on_exactly_whatever_dies(keep: dict[str, Any], seed: int, kills_after_s: list[int]) -> None:
    *groups, last = run(lambda: events_of_job(seed, request_for(6, keep=keep), kills_after_s))
    brought = sorted(played_of(each["sample"] for event in groups for each in event["samples"]))
    places = (0, 1, 4) if keep else range(6)
    assert brought == [played for played in PLAYED if played[0] in places]
    assert len(groups) == len(places)
    assert last["summary"]["groups"]["rollouts"] == last["summary"]["metrics"]["total_turns"] == (28 if keep else 36)


@pytest.mark.parametrize("cut_s", [-0.3, 0.0, 0.3, 1.0])
def test_a_job_whose_deadline_passes_when_its_replica_is_lost_starts_no_rollout_of_a_group_that_was_delivered(
    cut_s: float,
) -> None:
    async def scenario() -> tuple[list[int], int]:
        service = cluster(slowest_s=2, table=TABLE)
        job_id = (await service.post(0, request_for(), "/jobs")).json()["job_id"]
        takes_s = await events_by(service, job_id, 3)
        service, began = cluster(slowest_s=2, table=TABLE), virtual_time.now()
        job_id = (await service.post(0, request_for(deadline_s=takes_s), "/jobs")).json()["job_id"]
        await asyncio.sleep(began + takes_s + cut_s - virtual_time.now())
        service.kill(0)
        service.kill(1)
        await service.ended(job_id)
        *groups, last = await service.events(job_id)
        sizes = [len(event["samples"]) for event in groups]
        assert all(
            each["sample"]["group_size"] == size
            for event, size in zip(groups, sizes, strict=True)
            for each in event["samples"]
        )
        return sizes, last["summary"]["groups"]["rollouts"]

    sizes, rollouts = run(scenario)
    assert len(sizes) == 6
    assert sum(sizes) == rollouts


def test_the_cursor_of_a_job_names_the_samples_whose_groups_have_not_come() -> None:
    async def scenario() -> list[int]:
        service = cluster(table=TABLE)
        job_id = (await service.post(0, request_for(), "/jobs")).json()["job_id"]
        await service.ended(job_id)
        cursors = [await service.client(0).jobs.cursor(job_id, event) for event in range(7)]
        assert [cursor.kept for cursor in cursors] == [None] * 7
        return [cursor.samples_left for cursor in cursors]

    assert run(scenario) == [6, 5, 4, 3, 2, 1, 0]
