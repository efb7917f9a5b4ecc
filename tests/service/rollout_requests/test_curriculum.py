"""Samples that are selected by their pass rates: which come first, what the range says of it, and what is refused."""

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rollout_client.contract.sample_ranges import MOST_SAMPLES_OF_A_RANGE, SampleRange, SampleSelection
from service.rollout_requests import task_samples
from service.rollout_requests.curriculum import selected, selected_range
from tests.service.jobs.scripted_ingresses import run
from tests.service.jobs.selected_groups import cluster, request_for
from tests.service.rollout_requests.test_task_samples import service

SELECT = {"pass_rate": [0.2, 0.8]}


def chosen(rates: list[float | None], count: int, ids: str = "abcdefgh") -> list[int]:
    return selected(ids[: len(rates)], rates, SampleSelection.model_validate(SELECT), count)


def test_samples_without_a_rate_come_first_then_those_within_the_bounds_then_the_nearest() -> None:
    rates = [1.0, 0.5, None, 0.0, 0.9, 0.2, None]
    assert [chosen(rates, count) for count in (1, 2, 3, 4, 5, 6)] == [
        *([2], [2, 6], [1, 2, 6], [1, 2, 5, 6]),
        *([1, 2, 4, 5, 6], [0, 1, 2, 4, 5, 6]),
    ]


def test_a_sample_of_two_epochs_is_drawn_again_only_when_all_others_were() -> None:
    assert chosen([None, 0.0, None, 0.0], 2, ids="abab") == [0, 1]
    assert chosen([None, 0.0, None, 0.0], 3, ids="abab") == [0, 1, 2]


@given(places=st.sets(st.integers(0, 30), min_size=1), start=st.integers(0, 9))
def test_a_range_of_selected_samples_has_their_places_and_goes_on_after_the_last(places: set[int], start: int) -> None:
    drawn = SampleRange.model_validate({"task_name": "t", "start": start, "count": len(places), "select": SELECT})
    of_selected = selected_range(drawn, sorted(places))
    played = [place for piece in of_selected.pieces() for place in range(piece.start, piece.end)]
    assert played == [start + place for place in sorted(places)]
    assert not SampleRange.model_validate(of_selected.model_dump(exclude_unset=True)).is_to_be_selected


def test_a_range_cannot_be_selected_and_leave_places_out() -> None:
    with pytest.raises(ValidationError, match="a range with select has none"):
        SampleRange.model_validate(
            {"task_name": "t", "count": 3, "without": [{"start": 0, "count": 1}], "select": SELECT}
        )
    with pytest.raises(ValidationError, match="must not be above"):
        SampleSelection(pass_rate=[0.8, 0.2])


def select_request(count: int, start: int = 0, **select: Any) -> dict[str, Any]:
    drawn = {"task_name": "task", "start": start, "count": count, "select": {**SELECT, **select}}
    return {"samples_from": [drawn], "num_generations": 2}


def test_samples_that_were_never_played_come_before_others() -> None:
    async def scenario() -> list[Any]:
        ingresses = cluster()
        first = (await ingresses.post(0, select_request(4))).json()
        await asyncio.sleep(1)
        again = (await ingresses.post(1, select_request(2))).json()
        more = (await ingresses.post(1, {**select_request(4), "samples_from": again["next_samples_from"]})).json()
        return [first, again, more]

    first, again, more = run(scenario)
    assert [sample["id"] for sample in first["samples"][::2]] == ["s0", "s1", "s2", "s3"]
    assert first["next_samples_from"] == [{**select_request(4)["samples_from"][0], "start": 4}]
    # Four places are looked at for each sample: those at 4 to 7 are new.
    assert [sample["id"] for sample in again["samples"][::2]] == ["s4", "s5"]
    assert again["next_samples_from"] == [{**select_request(2)["samples_from"][0], "start": 6}]
    assert [sample["id"] for sample in more["samples"][::2]] == ["s6", "s7"]


def test_no_more_places_are_looked_at_than_a_range_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_samples, "SCANNED_PER_SAMPLE", MOST_SAMPLES_OF_A_RANGE)

    async def scenario() -> Any:
        return (await cluster().post(0, select_request(2))).json()

    assert [sample["id"] for sample in run(scenario)["samples"][::2]] == ["s0", "s1"]


def test_a_curriculum_passes_over_what_is_too_easy_or_too_hard() -> None:
    async def scenario() -> list[str]:
        ingresses = cluster()
        await ingresses.post(0, {"samples_from": [{"task_name": "task", "count": 16}], "num_generations": 2})
        await asyncio.sleep(1)
        answer = (await ingresses.post(1, select_request(4))).json()
        return [sample["id"] for sample in answer["samples"][::2]]

    assert run(scenario) == ["s0", "s3", "s5", "s7"]


def test_selected_samples_are_the_pool_from_which_groups_are_kept() -> None:
    async def scenario() -> Any:
        ingresses = cluster()
        await ingresses.post(0, {"samples_from": [{"task_name": "task", "count": 40}], "num_generations": 2})
        await asyncio.sleep(1)
        request = request_for(2, keep={"draw_at_most": 10})
        request["samples_from"][0]["select"] = SELECT
        return (await ingresses.post(0, request)).json()

    answer = run(scenario)
    assert [sample["id"] for sample in answer["samples"][::2]] == ["s0", "s3"]
    assert (answer["groups"]["drawn"], answer["groups"]["kept"]) == (2, 2)
    assert answer["next_samples_from"] == [{"task_name": "task", "start": 5, "count": 4, "select": SELECT}]


def test_a_job_plays_the_samples_that_were_selected_when_it_began_whatever_dies() -> None:
    async def scenario() -> tuple[set[str], Any]:
        ingresses = cluster()
        await ingresses.post(0, {"samples_from": [{"task_name": "task", "count": 8}], "num_generations": 2})
        await asyncio.sleep(1)
        job_id = (await ingresses.post(0, select_request(4), "/jobs")).json()["job_id"]
        # From now on these are not new any more, and others would be selected.
        known = {"samples_from": [{"task_name": "task", "start": 8, "count": 4}], "num_generations": 2}
        await ingresses.post(1, {**known, "deadline_s": 8})
        ingresses.kill(0)
        await ingresses.ended(job_id)
        *groups, end = await ingresses.events(job_id, 1)
        return {event["samples"][0]["sample"]["id"] for event in groups}, end["summary"]["next_samples_from"]

    played, following = run(scenario)
    assert played == {"s8", "s9", "s10", "s11"}
    assert [(drawn["start"], drawn["count"], drawn["select"]) for drawn in following] == [(12, 4, SELECT)]


@pytest.mark.parametrize(
    ("task_name", "message"),
    [
        ("sliding_puzzle", "task 'sliding_puzzle' has no data, so its samples have no pass rates; leave select out"),
        ("math", "the service's config has no jobs, whose store remembers pass rates; leave select out"),
    ],
)
def test_what_has_no_pass_rates_cannot_be_selected(task_name: str, message: str) -> None:
    http = service()
    refused = http.post({"samples_from": [{"task_name": task_name, "count": 1, "select": SELECT}]})
    [error] = refused.json()["errors"]
    assert (refused.status_code, error["field"], error["message"]) == (422, "samples_from[0].select", message)
    assert not http.has_started_something
