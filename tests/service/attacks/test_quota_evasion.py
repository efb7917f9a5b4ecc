"""Attempts to use more than a key's quota, and to have the service hold what it refuses."""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.failures import GenerationRejected
from service.access.access_control import AccessControl
from service.admission.capacity import Amounts
from service.settings import RequestLimits
from tests.clients.scripted_service import served
from tests.service.jobs.scripted_ingresses import ScriptedIngresses, request_of
from tests.service.jobs.test_jobs import GivenKeys, entry
from tests.service.keyed_http import KeyedHttp
from tests.service.routes.test_admission import wait_until_free
from tests.service.scripted import ScriptedEnvironment, ScriptedGenerator, outcome
from tests.service.scripted_http import NDJSON, SAMPLE

MANY = {"samples": [SAMPLE], "num_generations": 4}


def keyed(folder: Path, generator: ScriptedGenerator | None = None, max_rollouts: int | None = None) -> KeyedHttp:
    return KeyedHttp(folder, {"rollout": {"max_rollouts": max_rollouts}}, limits=RequestLimits(), generator=generator)


def post(service: KeyedHttp, body: Any, **headers: str) -> httpx.Response:
    return service.service.request("POST", "/rollout", json=body, headers=service.bearer("rollout") | headers)


@pytest.mark.parametrize(
    "body",
    [
        {"samples": [SAMPLE], "num_generations": 5},
        {"samples": [SAMPLE] * 5},
        {"samples_from": [{"task_name": "math", "count": 5}]},
        {"samples_from": [{"task_name": "math", "count": 2}], "num_generations": 3},
        {"samples": [SAMPLE], "samples_from": [{"task_name": "math", "count": 4}]},
    ],
)
def test_no_way_to_ask_for_rollouts_gets_more_than_the_quota(tmp_path: Path, body: dict[str, Any]) -> None:
    service = keyed(tmp_path, max_rollouts=4)
    answer = post(service, body)
    assert (answer.status_code, answer.json()["type"]) == (422, "urn:rollout:problem:invalid-request")
    assert not service.service.has_started_something


def test_scored_sequences_count_as_rollouts(tmp_path: Path) -> None:
    service = keyed(tmp_path, max_rollouts=4)
    body, headers = {"sequences": [[1, 2]] * 5}, service.bearer("rollout")
    assert service.service.request("POST", "/score", json=body, headers=headers).status_code == 422


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        json.dumps({"samples": [{**SAMPLE, "task_name": "chess"}]}).encode(),
        json.dumps({**MANY, "on_error": "fail"}).encode(),
        json.dumps(MANY).encode(),
    ],
)
@pytest.mark.parametrize("accept", ["application/json", NDJSON])
def test_a_request_that_ends_in_whatever_way_holds_nothing(tmp_path: Path, body: bytes, accept: str) -> None:
    service = keyed(tmp_path, ScriptedGenerator([GenerationRejected("no")]), max_rollouts=4)
    headers = service.bearer("rollout") | {"accept": accept}
    for _ in range(3):
        service.service.request("POST", "/rollout", content=body, headers=headers)
    assert service.service.admission.in_flight == Amounts()


def test_many_requests_at_once_get_the_quota_and_leaving_frees_it(tmp_path: Path) -> None:
    service = keyed(tmp_path, ScriptedGenerator(["A"], delay_s=60), max_rollouts=8)
    headers = service.bearer("rollout") | {"accept": NDJSON}

    def begin(number: int) -> tuple[int, httpx.Client, Any]:
        # One connection each, with what some count their callers by.
        client = httpx.Client(base_url=url)
        own = {"x-forwarded-for": f"10.0.0.{number}", "x-request-id": f"{number}", "user-agent": f"{number}"}
        response = client.send(client.build_request("POST", "/rollout", json=MANY, headers=headers | own), stream=True)
        return response.status_code, client, response

    with served(service.service.app) as url, ThreadPoolExecutor(20) as pool:
        begun = list(pool.map(begin, range(20)))
        assert sorted(status for status, _, _ in begun) == [200] * 2 + [429] * 18
        assert service.service.admission.in_flight.rollouts == 8
        for _, client, response in begun:
            response.close()
            client.close()
        wait_until_free(service.service)
        assert service.service.admission.in_flight == Amounts()


TEAM = {"authorization": "Bearer secret"}


def of_team(max_rollouts: int) -> ScriptedIngresses:
    """One ingress replica whose generations take 30 s."""
    access = AccessControl(GivenKeys(entry("team", "secret", max_rollouts=max_rollouts)))  # type: ignore[arg-type]
    environment = ScriptedEnvironment([outcome("x", terminated=True)])
    return ScriptedIngresses(1, ScriptedGenerator(["abc"], delay_s=30), environment, access)


def held_on(cluster: ScriptedIngresses) -> list[int]:
    """Rollouts that are held on each ingress replica, all by the key `team`."""
    return [replica.rollouts.admission.in_flight.rollouts for replica in cluster.replicas]


@pytest.mark.slow
@pytest.mark.parametrize(("path", "headers"), [("/rollout", {"idempotency_key": "k"}), ("/jobs", {})])
async def test_a_job_holds_the_rollouts_of_its_key_until_it_ends(path: str, headers: dict[str, str]) -> None:
    cluster = of_team(max_rollouts=2)
    posted = asyncio.create_task(cluster.post(0, request_of(groups=1), path=path, **TEAM, **headers))
    await asyncio.sleep(5)
    assert held_on(cluster) == [2]
    refused = await cluster.post(0, request_of(groups=1), **TEAM)
    assert (refused.status_code, refused.json()["type"]) == (429, "urn:rollout:problem:quota-exceeded")
    await asyncio.sleep(60)
    assert held_on(cluster) == [0]
    assert (await posted).status_code in (200, 202)


async def test_a_request_that_is_posted_again_costs_its_quota_once() -> None:
    cluster = of_team(max_rollouts=4)
    posts = []
    for _ in range(3):
        posts.append(asyncio.create_task(cluster.post(0, request_of(groups=1), **TEAM, idempotency_key="k")))
        await asyncio.sleep(5)
        assert held_on(cluster) == [2]
    answers = await asyncio.gather(*posts)
    again = await cluster.post(0, request_of(groups=1), **TEAM, idempotency_key="k")
    assert {answer.content for answer in answers} == {again.content}
    assert len(cluster.generator.requests) == 2
    assert held_on(cluster) == [0]
