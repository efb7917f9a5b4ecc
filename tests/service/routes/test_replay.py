"""`POST /replay` over the HTTP application: what is read, what is refused, and what the client returns."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from deployments.rollout_records.book import RolloutRecordsSettings
from deployments.rollout_records.store import RolloutRecordStore
from rollout_client import AsyncRolloutClient
from rollout_client.contract.records import ReplayResponse
from rollout_client.contract.rollouts import SampleResult
from service.rollout_records.recorder import RolloutRecorder
from tests.service.replay.seeded_engine import SeededGenerator
from tests.service.scripted import outcome
from tests.service.scripted_http import ScriptedHttp

SAMPLE = {"task_name": "math", "messages": [{"role": "user", "content": "Q"}]}
SAMPLING = {"seed": 7, "temperature": 0.5, "max_new_tokens": 4}


def http_with(recorder: RolloutRecorder | None = None) -> ScriptedHttp:
    http = ScriptedHttp(generator=SeededGenerator(versions=[3]), recorder=recorder)
    http.environments["math"].script = [outcome("more", 0.25), outcome(reward=1.0, terminated=True)]
    return http


async def replayed(http: ScriptedHttp, by_id: bool = False) -> tuple[SampleResult, ReplayResponse]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(http.app)) as http_client:
        client = AsyncRolloutClient("http://service", retries=0, http_client=http_client)
        [result] = (await client.rollout([SAMPLE], sampling=SAMPLING)).samples
        return result, await (client.replay(rollout_id=result.rollout_id) if by_id else client.replay(result))


@pytest.mark.parametrize("by_id", [False, True])
def test_a_result_or_a_record_of_one_is_generated_again(by_id: bool) -> None:
    store: Any = RolloutRecordStore(RolloutRecordsSettings())
    result, again = asyncio.run(replayed(http_with(RolloutRecorder(store)), by_id))
    assert (again.verdict, again.rollout_id) == ("equal", result.rollout_id)
    assert [(each.message, each.weight_version) for each in again.generations] == [(1, "3"), (3, "3")]
    assert again.tokens == result.metrics.assistant_tokens


@pytest.mark.parametrize(
    ("body", "status", "sentence"),
    [
        ({}, 422, "send one of rollout, a result, and rollout_id"),
        ({"rollout_id": "a"}, 501, "add `rollout_records: {}`"),
        ({"rollout_id": "a", "temperature": 1}, 422, "this field is not known"),
        ("{", 400, "Invalid JSON"),
    ],
)
def test_what_is_no_replay_is_refused_with_a_sentence(body: Any, status: int, sentence: str) -> None:
    content = body if isinstance(body, str) else json.dumps(body)
    response = http_with().request("POST", "/v1/replay", content=content)
    assert response.status_code == status
    assert sentence in response.json()["detail"]


def test_images_that_the_service_does_not_take_are_refused() -> None:
    http = http_with()
    result, _ = asyncio.run(replayed(http))
    document = json.loads(result.model_dump_json())
    document["message_log"][0]["mm_ranges"] = [{"media": f"sha256:{'0' * 64}", "start": 0, "end": 1}]
    http.generator.requests.clear()
    response = http.request("POST", "/replay", content=json.dumps({"rollout": document}))
    assert response.status_code == 422
    assert response.json()["errors"][0]["field"] == "rollout.message_log[0].mm_ranges[0]"
    assert http.generator.requests == []
