"""`GET /rollouts/{rollout_id}`: the record of a rollout that has ended."""

import re
from typing import Any

import pytest

from deployments.failures import RolloutRecordsLost
from deployments.rollout_records.book import RolloutRecordsSettings
from deployments.rollout_records.store import RolloutRecordStore
from rollout_client import AsyncRolloutClient
from rollout_client.contract.records import RecordedRollout
from service.rollout_records import recorder
from service.rollout_records.recorder import RolloutRecorder
from tests import virtual_time
from tests.service.routes.test_replay import SAMPLE, SAMPLING
from tests.service.scripted import ScriptedGenerator, outcome
from tests.service.scripted_http import ScriptedHttp


def recording_http(store: Any = None, clock: float = 50.0) -> ScriptedHttp:
    store = store or RolloutRecordStore(RolloutRecordsSettings(), lambda: clock)
    http = ScriptedHttp(generator=ScriptedGenerator(["AB"]), recorder=RolloutRecorder(store, lambda: clock))
    http.environments["math"].script = [outcome("more", 0.25), outcome(reward=1.0, terminated=True)]
    return http


async def record_after(client: AsyncRolloutClient) -> tuple[Any, Any]:
    """The result of a rollout, and its record."""
    [result] = (await client.rollout([SAMPLE], sampling=SAMPLING, request_id="step/1")).samples
    return result, await client.rollout_record(result.rollout_id or "")


def test_the_record_of_a_rollout_has_its_result_and_generations() -> None:
    result, record = recording_http().call(record_after)
    assert record.rollout == result
    assert (record.request_id, record.ended_at, record.policy) == ("step/1", 50.0, None)
    assert re.fullmatch("step/1-[0-9a-f]{16}-0-0", result.rollout_id)
    assert [(one.message, one.start, one.end) for one in record.generations] == [(1, 0, 2), (3, 0, 2)]
    assert [step.turn for step in record.steps] == [0, 1]
    assert record.began_at is not None
    assert record.began_at <= record.steps[0].began_at <= record.steps[1].began_at
    assert (record.priority, record.retries) == ("train", [])
    assert (record.restarts, record.retries_used) == (0, 0)


def test_a_rollout_that_is_not_known_is_a_404_with_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "KEPT_AFTER_S", ())
    response = recording_http().request("GET", "/rollouts/step%2F1-x-0-0")
    assert response.status_code == 404
    assert "rollout_id: there is no record of it" in response.json()["detail"]


def test_a_service_without_records_says_what_to_add_to_its_config() -> None:
    response = ScriptedHttp().request("GET", "/rollouts/a")
    assert response.status_code == 501
    assert "rollout_records: {}" in response.json()["detail"]


class LostStore:
    async def keep(self, records: Any) -> None:
        raise RolloutRecordsLost("The store is gone.")


def test_a_lost_store_costs_no_rollout_anything() -> None:
    response = recording_http(LostStore()).post({"samples": [SAMPLE], "num_generations": 2})
    assert response.status_code == 200
    assert [sample["status"] for sample in response.json()["samples"]] == ["completed"] * 2


def test_the_rollouts_that_ended_last_are_listed_the_newest_first() -> None:
    async def listed(client: AsyncRolloutClient) -> list[RecordedRollout]:
        for name in ("first", "second"):
            await client.rollout([SAMPLE], request_id=name)
        # Records are written beside the answers.
        await virtual_time.settled()
        return await client.rollout_records(count=5)

    lines = [(line.request_id, line.status, line.total_reward) for line in recording_http().call(listed)]
    assert lines == [("second", "completed", 1.25), ("first", "completed", 1.25)]
