"""`keep.where` over HTTP, in virtual time: answers, streams, Arrow, keys, jobs, takeovers and cursors agree."""

import asyncio
import json
from typing import Any

import httpx
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_client.arrow.schema import ARROW
from rollout_client.calls.arrow_bodies import read_response
from tests import virtual_time
from tests.service.jobs.scripted_ingresses import ScriptedIngresses, run
from tests.service.jobs.selected_groups import VARIED, cluster, request_for
from tests.service.scripted import without_names
from tests.service.scripted_http import NDJSON

KEPT = VARIED[:4]


def ids_of(samples: Any) -> list[str]:
    return [sample["id"] for sample in samples]


def posted(request: dict[str, Any], seed: int = 0, **headers: str) -> httpx.Response:
    async def post() -> httpx.Response:
        return await cluster(seed).post(0, request, **headers)

    response: httpx.Response = run(post)
    assert response.status_code == 200, response.text
    return response


def ids(places: list[int]) -> list[str]:
    return [f"s{place}" for place in places for _ in range(2)]


def without_ahead(groups: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in groups.items() if name != "ahead"}


def test_the_first_groups_that_pass_are_the_answer() -> None:
    answer = posted(request_for(4)).json()
    assert KEPT == [0, 3, 5, 7]
    assert ids_of(answer["samples"]) == ids(KEPT)
    assert [sample["generation_index"] for sample in answer["samples"]] == [0, 1] * 4
    assert [sample["idx"] for sample in answer["samples"]] == [place for place in KEPT for _ in range(2)]
    assert without_ahead(answer["groups"]) == {"drawn": 8, "kept": 4, "dropped": {"reward_std.gt": 4}}
    assert answer["next_samples_from"] == [{"task_name": "task", "start": 8, "count": 4}]
    # All rollouts that were judged, those of the dropped groups included.
    assert answer["metrics"]["total_turns"] == 16


def test_it_ends_with_fewer_groups_when_all_that_may_be_drawn_are() -> None:
    answer = posted(request_for(4, keep={"draw_at_most": 5})).json()
    assert ids_of(answer["samples"]) == ids([0, 3])
    assert answer["groups"] == {"drawn": 5, "kept": 2, "dropped": {"reward_std.gt": 3}, "ahead": 0}
    assert answer["next_samples_from"] == [{"task_name": "task", "start": 5, "count": 4}]


def test_posted_samples_are_drawn_in_their_order() -> None:
    prompt = [{"role": "user", "content": "q"}]
    samples = [
        {"task_name": "task", "messages": prompt, "id": f"s{place}", "extra_env_info": {"place": place}}
        for place in (3, 2, 1, 0, 5, 7)
    ]
    request = {**request_for(2), "samples": samples}
    del request["samples_from"]
    answer = posted(request).json()
    assert ids_of(answer["samples"]) == ids([3, 0])
    assert without_ahead(answer["groups"]) == {"drawn": 4, "kept": 2, "dropped": {"reward_std.gt": 2}}
    assert "next_samples_from" not in answer


def test_a_stream_and_arrow_have_the_rollouts_of_the_whole_answer() -> None:
    whole = posted(request_for(4)).json()
    lines = posted(request_for(4), accept=NDJSON).text.splitlines()
    *rollouts, summary = map(json.loads, filter(None, lines))
    assert [line["position"] for line in rollouts] == list(range(8))
    assert without_names(line["sample"] for line in rollouts) == without_names(whole["samples"])
    table = read_response(posted(request_for(4), accept=ARROW).content)
    assert [sample.id for sample in table.samples] == ids(KEPT)
    for groups in (summary["summary"]["groups"], table.groups.model_dump(exclude_unset=True) if table.groups else {}):
        assert without_ahead(groups) == without_ahead(whole["groups"])
    assert summary["summary"]["next_samples_from"] == whole["next_samples_from"]
    assert [each.model_dump(exclude_unset=True) for each in table.next_samples_from] == whole["next_samples_from"]


async def play(service: ScriptedIngresses, groups: int, kills_after_s: list[int]) -> tuple[str, list[dict[str, Any]]]:
    """A job's id and its events, whose ingress replicas are killed after so many seconds each."""
    job_id = await service.submit(request_for(groups))
    for seconds in kills_after_s:
        await asyncio.sleep(seconds)
        service.kill(0)
        service.kill(1)
    await service.ended(job_id)
    return job_id, await service.events(job_id)


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 99), kills_after_s=st.lists(st.integers(1, 25), max_size=3))
@virtual_time.synchronous
async def test_a_job_brings_each_group_once_in_order_whatever_dies(seed: int, kills_after_s: list[int]) -> None:
    _, (*groups, last) = await play(cluster(seed), 5, kills_after_s)
    played = [[each["sample"] for each in event["samples"]] for event in groups]
    assert [ids_of(samples) for samples in played] == [[f"s{place}"] * 2 for place in VARIED[:5]]
    assert [each["position"] for event in groups for each in event["samples"]] == list(range(10))
    assert without_ahead(last["summary"]["groups"]) == {"drawn": 9, "kept": 5, "dropped": {"reward_std.gt": 4}}
    assert last["summary"]["metrics"]["total_turns"] == 18


async def test_a_summary_has_all_groups_whose_events_came_before_a_death() -> None:
    service = cluster(slowest_s=2)
    job_id = await service.submit(request_for(7))
    while (await service.request(0, "GET", f"/jobs/{job_id}")).json()["last_event"] < 5:
        await asyncio.sleep(0.01)
    service, began = cluster(slowest_s=2), virtual_time.now()
    job_id = await service.submit(request_for(7, deadline_s=began + 0.3))
    await asyncio.sleep(began + began + 0.2 - virtual_time.now())
    service.kill(0)
    service.kill(1)
    service.generator.delay_s = 1000
    await service.ended(job_id)
    *groups, last = await service.events(job_id)
    assert (len(groups), last["summary"]["groups"]["kept"]) == (5, 5)


async def test_the_cursor_of_a_job_begins_after_the_last_sample_of_its_events() -> None:
    service = cluster()
    job_id, events = await play(service, 3, [])
    jobs = service.client(0).jobs
    cursors = [await jobs.cursor(job_id, event) for event in range(len(events) + 1)]
    assert [cursor.samples_from[0].revision for cursor in cursors] == ["1 with seed None"] * 5
    assert await jobs.resume(cursors[-1], **request_for(3)) is None
    assert await jobs.resume(cursors[1], **request_for(3)) == cursors[1]
    places = [(cursor.kept, cursor.samples_from[0].start) for cursor in cursors]
    assert places == [(None, 0), (1, 1), (2, 4), (3, 6), (3, 6)]
