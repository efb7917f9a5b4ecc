"""Jobs of forks: played like others, and taken over with the logs that they began with."""

import asyncio

import pytest

from deployments.rollout_records.book import BYTES_PER_ENTRY, KeptRecord, RolloutRecordsSettings, RolloutUnknown
from deployments.rollout_records.store import RolloutRecordStore
from tests import virtual_time
from tests.service.jobs.scripted_ingresses import ScriptedIngresses
from tests.service.scripted import ScriptedEnvironment, ScriptedGenerator, outcome

MAX_BYTES = 2**20
PLAYED = {"task_name": "task", "messages": [{"role": "user", "content": "Q"}]}


def cluster_with_records() -> tuple[ScriptedIngresses, RolloutRecordStore]:
    """Each generation takes 10 s."""
    script = [outcome("1"), outcome("2"), outcome("3")]
    store = RolloutRecordStore(RolloutRecordsSettings(max_bytes=MAX_BYTES), virtual_time.now)
    generator, environment = ScriptedGenerator(["abc"], delay_s=10), ScriptedEnvironment(script)
    return ScriptedIngresses(generator=generator, environment=environment, records=store), store


async def parent_of(cluster: ScriptedIngresses) -> str:
    answer = (await cluster.post(0, {"samples": [PLAYED], "max_rollout_turns": 2})).json()
    return str(answer["samples"][0]["rollout_id"])


@virtual_time.test
async def test_a_job_of_forks_goes_on_without_the_record_of_their_parent() -> None:
    cluster, store = cluster_with_records()
    parent = await parent_of(cluster)
    body = {"samples": [{"task_name": "task", "fork": {"rollout": parent, "turn": 0}}], "max_rollout_turns": 4}
    job_id = (await cluster.post(0, body, path="/jobs")).json()["job_id"]
    await asyncio.sleep(15)
    await store.keep([KeptRecord("newer", "", bytes(MAX_BYTES - BYTES_PER_ENTRY))])
    with pytest.raises(RolloutUnknown):
        await store.record(parent, "")
    cluster.kill(0)
    await cluster.ended(job_id)
    rollout = (await cluster.events(job_id))[0]["samples"][0]["sample"]
    assert (rollout["status"], rollout["parent"], rollout["forked_at"]["turn"]) == ("max_turns", parent, 0)
    assert sum("generation_logprobs" in message for message in rollout["message_log"]) == 4


@virtual_time.test
async def test_a_job_that_forks_what_is_not_known_is_refused() -> None:
    cluster, _ = cluster_with_records()
    body = {"samples": [{"task_name": "task", "fork": {"rollout": "gone", "turn": 0}}]}
    refused = await cluster.post(0, body, path="/jobs")
    assert refused.status_code == 422
    assert "samples[0].fork: there is no record of it" in refused.json()["detail"]
