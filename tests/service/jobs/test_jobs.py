"""`/jobs`: posted, followed, acknowledged and deleted."""

import asyncio
import json
from typing import Any

import pytest

from service.access.access_control import AccessControl
from service.access.keys import KeyRing, hash_of, parsed_keys
from tests.service.jobs.scripted_ingresses import ScriptedIngresses, request_of, slow_cluster

REQUEST = request_of(groups=3)


async def test_a_job_is_accepted_and_known_to_any_replica() -> None:
    cluster = ScriptedIngresses()
    response = await cluster.post(0, REQUEST, path="/jobs", x_request_id="step-17")
    accepted = response.json()
    assert (response.status_code, response.headers["location"]) == (202, f"/v1/jobs/{accepted['job_id']}")
    assert (accepted["state"], accepted["last_event"], accepted["request_id"]) == ("running", 0, "step-17")
    assert (await cluster.request(1, "GET", response.headers["location"])).json()["job_id"] == accepted["job_id"]
    ended = await cluster.ended(accepted["job_id"])
    assert (ended["state"], ended["last_event"], ended["acknowledged"]) == ("completed", 4, 0)
    [listed] = (await cluster.request(1, "GET", "/jobs")).json()["jobs"]
    assert listed == ended


async def test_the_events_are_the_groups_and_then_the_summary() -> None:
    cluster = ScriptedIngresses()
    answer = (await cluster.post(0, REQUEST, idempotency_key="k")).json()
    [job] = await cluster.all_jobs()
    events = await cluster.events(job["job_id"], replica=1)
    assert [event["event"] for event in events] == [1, 2, 3, 4]
    groups = [[each["position"] for each in event["samples"]] for event in events[:-1]]
    assert sorted(groups) == [[0, 1], [2, 3], [4, 5]]
    played = sorted(await cluster.samples(job["job_id"]), key=lambda each: int(each["position"]))
    assert [each["sample"] for each in played] == answer["samples"]
    assert events[-1]["summary"]["metrics"] == answer["metrics"]
    assert await cluster.events(job["job_id"], after=2, replica=1) == events[2:]
    assert await cluster.events(job["job_id"], after=4) == []


async def test_only_events_that_a_job_has_are_acknowledged() -> None:
    cluster = ScriptedIngresses()
    path = f"/jobs/{await cluster.submit(REQUEST)}/acknowledge"
    for last in (9, -1):
        refused = await cluster.request(0, "POST", path, json={"last": last})
        assert (refused.status_code, refused.json()["errors"][0]["field"]) == (422, "last")


async def test_a_deleted_job_stops_at_once_and_is_not_known_any_longer() -> None:
    cluster = slow_cluster()
    job_id = await cluster.submit(REQUEST, idempotency_key="k")
    await asyncio.sleep(1)
    following = asyncio.create_task(cluster.request(1, "GET", f"/jobs/{job_id}/events", params={"follow": False}))
    assert (await following).text == ""
    assert (await cluster.request(1, "DELETE", f"/jobs/{job_id}")).status_code == 204
    await asyncio.sleep(0.1)
    assert cluster.generator.cancelled == 6
    assert (await cluster.request(0, "GET", f"/jobs/{job_id}")).status_code == 404
    assert (await cluster.post(0, REQUEST, path="/jobs", idempotency_key="k")).json()["job_id"] != job_id


async def test_a_stream_that_is_silent_sends_heartbeats() -> None:
    cluster = slow_cluster()
    job_id = await cluster.submit(request_of(groups=1))
    lines = (await cluster.request(0, "GET", f"/jobs/{job_id}/events")).text.split("\n")
    assert lines[:2] == ["", ""], "one after 15 s and one after 30 s"
    assert [json.loads(line)["event"] for line in lines[2:] if line] == [1, 2]


async def test_the_stream_of_a_rollout_has_the_heartbeats_that_are_asked_for() -> None:
    async def lines(**headers: str) -> list[str]:
        response = await slow_cluster().post(0, request_of(groups=1), accept="application/x-ndjson", **headers)
        return response.text.split("\n")

    assert (await lines())[0] != ""
    asked = await lines(prefer="heartbeat=12")
    assert asked[:3] == ["", "", ""]
    assert [list(json.loads(line)) for line in asked[3:6]] == [["position", "sample"]] * 2 + [["summary"]]
    assert (await lines(prefer="heartbeat=12", idempotency_key="k"))[:3] == ["", "", ""]


@pytest.mark.parametrize("scope", ["rollout", "admin"])
async def test_the_jobs_and_keys_of_another_caller_are_unknown(scope: str) -> None:
    own, others = ({"authorization": f"Bearer key-{name}"} for name in "ab")
    keys: Any = GivenKeys(entry("a", "key-a"), entry("b", "key-b", scope))
    cluster = ScriptedIngresses(access=AccessControl(keys))
    path = f"/jobs/{await cluster.submit(REQUEST, idempotency_key='k', **own)}"
    for method, below, body in (
        ("GET", "", None),
        ("GET", "/events", None),
        ("POST", "/acknowledge", {"last": 0}),
        ("DELETE", "", None),
    ):
        assert (await cluster.request(1, method, path + below, json=body, headers=others)).status_code == 404
    assert (await cluster.request(1, "GET", "/jobs", headers=others)).json() == {"jobs": []}
    other = await cluster.post(1, request_of(groups=1), path="/jobs", idempotency_key="k", **others)
    assert other.status_code == 202, "the same key is another one there"
    assert (await cluster.request(0, "GET", path, headers=own)).status_code == 200
    assert (await cluster.request(0, "GET", path)).status_code == 401
    keys.set(entry("a", "key-a"), entry("b", "key-b", scope), entry("a", "key-c"))
    deleted = await cluster.request(1, "DELETE", path, headers={"authorization": "Bearer key-c"})
    assert deleted.status_code == 204, "a second key of the same name is the same caller"


class GivenKeys:
    """In the place of a keys file."""

    def __init__(self, *entries: dict[str, Any]) -> None:
        self.set(*entries)

    def set(self, *entries: dict[str, Any]) -> None:
        self.ring = parsed_keys(json.dumps({"keys": entries}).encode())

    async def keys(self) -> KeyRing:
        return self.ring


def entry(name: str, key: str, *scopes: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "sha256": hash_of(key), "scopes": scopes or ["rollout"], **fields}


@pytest.mark.parametrize(
    ("now_in_the_file", "problem"),
    [
        ([entry("team", "new", max_rollouts=12)], None),
        ([entry("team", "new", "read"), entry("team", "other", "rollout")], None),
        ([entry("team", "new", max_rollouts=5)], "invalid-request"),
        ([entry("team", "new", "read")], "not-allowed"),
        ([entry("others", "new")], "not-authenticated"),
    ],
    ids=["allowed", "allowed by one of two keys", "over its quota now", "without the scope now", "revoked"],
)
async def test_a_job_may_do_what_its_key_allows_now(now_in_the_file: list[dict[str, Any]], problem: str | None) -> None:
    keys: Any = GivenKeys(entry("team", "old", "admin", max_rollouts=6))
    cluster = slow_cluster(access=AccessControl(keys))
    headers = {"authorization": "Bearer old"}
    job_id = await cluster.submit(REQUEST, **headers)
    before = keys.ring
    keys.set(*now_in_the_file)
    cluster.kill(0)
    await asyncio.sleep(100)
    keys.ring = before
    lines = (await cluster.request(0, "GET", f"/jobs/{job_id}/events", headers=headers)).text.splitlines()
    last = json.loads(next(line for line in reversed(lines) if line))
    assert last.get("problem", {}).get("type") == (problem and f"urn:rollout:problem:{problem}")
