"""`Idempotency-Key` of `POST /rollout`: one run, whichever replica is asked and how often."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from deployments.failures import GenerationRejected
from rollout_client.arrow.schema import ARROW
from rollout_client.calls.arrow_bodies import read_response
from service.jobs.runner import MOST_GATHERING
from tests.service.jobs.scripted_ingresses import ScriptedIngresses, request_of, slow_cluster
from tests.service.scripted import ScriptedGenerator, outcome, without_names
from tests.service.scripted_http import ScriptedHttp

REQUEST = request_of()


def without_request_id(response: httpx.Response) -> dict[str, Any]:
    answer: dict[str, Any] = response.json()
    del answer["request_id"]
    return answer


async def test_a_request_with_a_key_has_the_answer_of_one_without() -> None:
    plain = await ScriptedIngresses().post(0, REQUEST)
    keyed = await ScriptedIngresses().post(0, REQUEST, idempotency_key='"k"')
    assert (plain.status_code, keyed.status_code) == (200, 200)
    expected, found = without_request_id(plain), without_request_id(keyed)
    # Their order is that in which rollouts end.
    for answer in (expected, found):
        answer["samples"] = without_names(answer["samples"])
        for name in list(answer["metrics"]):
            if name.startswith("histogram/"):
                answer["metrics"][name].sort()
    assert found == expected


async def test_a_request_posted_again_attaches_to_the_running_one() -> None:
    cluster = ScriptedIngresses()
    first = asyncio.create_task(cluster.post(0, REQUEST, idempotency_key='"k"'))
    await asyncio.sleep(1)
    assert (await cluster.post(1, REQUEST, idempotency_key='"k"')).content == (await first).content
    generations = [request.generation_id for request in cluster.generator.requests]
    assert len(generations) == len(set(generations))
    assert len({generation.rpartition("-")[0].split("-")[1] for generation in generations}) == 1, "all of one run"


async def test_a_request_posted_again_gets_the_stored_answer_in_any_format() -> None:
    cluster = ScriptedIngresses()
    first = await cluster.post(0, REQUEST, idempotency_key='"k"')
    played = len(cluster.generator.requests)
    assert (await cluster.post(1, REQUEST, idempotency_key="k")).content == first.content
    lines = (await cluster.post(1, REQUEST, idempotency_key="k", accept="application/x-ndjson")).text.splitlines()
    by_position = {line["position"]: line["sample"] for line in map(json.loads, lines[:-1])}
    assert [by_position[position] for position in range(4)] == first.json()["samples"]
    arrow = read_response((await cluster.post(1, REQUEST, idempotency_key="k", accept=ARROW)).content)
    assert [sample.id for sample in arrow.samples] == ["s0", "s0", "s1", "s1"]
    assert len(cluster.generator.requests) == played


async def test_a_key_with_another_body_is_refused() -> None:
    cluster = ScriptedIngresses()
    await cluster.post(0, REQUEST, idempotency_key='"k"')
    other = await cluster.post(1, request_of(groups=1), idempotency_key='"k"')
    assert (other.status_code, other.json()["type"]) == (422, "urn:rollout:problem:idempotency-key-reused")
    assert other.json()["errors"][0]["field"] == "header.Idempotency-Key"


@pytest.mark.parametrize("key", ['""', '"open', "a b", '"k";x=1', '("k")', "?1", '"' + "k" * 256 + '"', "ü"])
async def test_a_key_that_is_none_is_refused(key: str) -> None:
    headers = [(b"idempotency-key", key.encode("latin-1"))]
    response = await ScriptedIngresses().request(0, "POST", "/rollout", content="{}", headers=headers)
    assert (response.status_code, response.json()["errors"][0]["field"]) == (422, "header.Idempotency-Key")


@pytest.mark.parametrize("path", ["/jobs", "/rollout"])
@pytest.mark.parametrize("late", ["", "write"])
async def test_a_request_that_is_refused_leaves_its_key_free(path: str, late: str) -> None:
    cluster = ScriptedIngresses()
    cluster.answers_late = late
    unknown = {"samples": [{"task_name": "chess", "messages": [{"role": "user", "content": "q"}]}]}
    refused = await cluster.post(0, unknown, path=path, idempotency_key="k")
    assert (refused.status_code, refused.json()["errors"][0]["field"]) == (422, "samples[0].task_name")
    assert (await cluster.post(1, REQUEST, idempotency_key="k")).status_code == 200
    [job] = await cluster.all_jobs()
    assert job["state"] == "completed", "what was refused is forgotten"


async def test_a_failed_request_fails_again_without_a_second_run() -> None:
    cluster = ScriptedIngresses(generator=ScriptedGenerator([GenerationRejected("no")]))
    request = request_of(on_error="fail", groups=1, num_generations=1)
    for replica in (0, 1):
        answer = await cluster.post(replica, request, idempotency_key="k")
        assert (answer.status_code, answer.json()["type"]) == (502, "urn:rollout:problem:sample-failed")
    assert len(cluster.generator.requests) == 1


async def test_a_write_of_an_earlier_epoch_does_not_stop_a_job() -> None:
    cluster = slow_cluster(19, outcome("x"), outcome("x", terminated=True), replicas=1)
    posted = asyncio.create_task(cluster.post(0, request_of(groups=1, num_generations=1), idempotency_key="k"))
    await asyncio.sleep(18.5)
    # The first turn ends at 19 s. Its write comes to the store at 22 s, when the replica has the job for a new epoch.
    cluster.arrives_late = "write"
    await asyncio.sleep(1.5)
    [job] = await cluster.all_jobs()
    await cluster.store.release(cluster.replicas[0].jobs.owner, [job["job_id"]])
    assert (await posted).status_code == 200
    assert (len(cluster.generator.requests), cluster.generator.cancelled) == (2, 0), "none was cancelled"


async def test_only_so_many_callers_gather_the_answer_of_one_key_at_once() -> None:
    cluster = slow_cluster(10)
    waiting = [asyncio.create_task(cluster.post(0, REQUEST, idempotency_key="k")) for _ in range(MOST_GATHERING)]
    await asyncio.sleep(1)
    refused = await cluster.post(0, REQUEST, idempotency_key="k")
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "5")
    assert refused.json()["type"] == "urn:rollout:problem:overloaded"
    streams = cluster.post(0, REQUEST, idempotency_key="k", accept="application/x-ndjson")
    elsewhere = cluster.post(1, REQUEST, idempotency_key="k")
    assert {answer.status_code for answer in await asyncio.gather(*waiting, streams, elsewhere)} == {200}
    assert (await cluster.post(0, REQUEST, idempotency_key="k")).status_code == 200


def test_a_service_without_jobs_refuses_keys_and_jobs() -> None:

    service = ScriptedHttp()
    refused = service.post(REQUEST, idempotency_key="k")
    assert (refused.status_code, refused.json()["type"]) == (501, "urn:rollout:problem:jobs-not-configured")
    assert service.request("GET", "/jobs").status_code == 501
    assert not service.has_started_something
