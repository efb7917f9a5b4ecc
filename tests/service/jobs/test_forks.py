"""Jobs of forks: played like others, and taken over with the logs that they began with."""

import asyncio

import pytest

from deployments.rollout_records.book import BYTES_PER_ENTRY, KeptRecord, RolloutRecordsSettings, RolloutUnknown
from deployments.rollout_records.store import RolloutRecordStore
from tests import virtual_time
from tests.service.jobs.scripted_ingresses import ScriptedIngresses, slow_cluster
from tests.service.scripted import outcome

MAX_BYTES = 2**20
PLAYED = {"task_name": "task", "messages": [{"role": "user", "content": "Q"}]}


def cluster_with_records() -> ScriptedIngresses:
    store = RolloutRecordStore(RolloutRecordsSettings(max_bytes=MAX_BYTES), virtual_time.now)
    return slow_cluster(10, outcome("1"), outcome("2"), outcome("3"), records=store)


async def test_a_job_of_forks_goes_on_without_the_record_of_their_parent() -> None:
    cluster = cluster_with_records()
    parent = (await cluster.post(0, {"samples": [PLAYED], "max_rollout_turns": 2})).json()["samples"][0]["rollout_id"]
    body = {"samples": [{"task_name": "task", "fork": {"rollout": parent, "turn": 0}}], "max_rollout_turns": 4}
    job_id = await cluster.submit(body)
    await asyncio.sleep(15)
    await cluster.records.keep([KeptRecord("newer", "", bytes(MAX_BYTES - BYTES_PER_ENTRY))])
    with pytest.raises(RolloutUnknown):
        await cluster.records.record(parent, "")
    cluster.kill(0)
    await cluster.ended(job_id)
    rollout = (await cluster.samples(job_id))[0]["sample"]
    assert (rollout["status"], rollout["parent"], rollout["forked_at"]["turn"]) == ("max_turns", parent, 0)
    assert sum("generation_logprobs" in message for message in rollout["message_log"]) == 4
