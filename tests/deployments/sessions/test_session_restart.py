"""What a session store that starts again has of the one before it, and what a failing database does to its calls."""

import asyncio
import json
from unittest.mock import patch

import pytest

from deployments.sessions.records import SessionClosed, SessionLimitReached, SessionUnknown
from deployments.sessions.session_table import SESSION_BYTES, SessionsSettings
from deployments.storage.storage import EntryName, StorageFailed, StoreReplaced
from rollout_client.contract.rollouts import SampleInput
from rollout_client.contract.sessions import SessionLimits, SessionReward
from tests import virtual_time
from tests.deployments.sessions.test_session_store import PLAIN, QUESTION, Kept, opening

pytestmark = pytest.mark.true_clock


async def test_a_store_that_starts_again_has_all_of_the_sessions() -> None:
    sample = SampleInput.model_validate({"task_name": "math", "id": "mine", "more": [1]})
    kept = await Kept().open(sample=sample, generation_index=2)
    await kept.call("one")
    await kept.open("t")
    opened, samples = await kept.store.opened("s"), await kept.store.samples("s", "team")
    infos = await kept.store.infos("team")
    assert (samples.samples[0].id, samples.samples[0].generation_index) == ("mine", 2)
    kept.start()
    assert await kept.store.opened("s") == opened
    assert opened.key_sha256 == "hash"
    assert await kept.store.samples("s", "team") == samples
    assert [info.id for info in infos] == ["s", "t"]
    assert await kept.store.infos("team") == infos


async def test_a_store_that_starts_again_knows_limits_deadline_and_end() -> None:
    kept = await Kept().open(limits=SessionLimits(max_calls=2), deadline_s=50)
    await kept.call("one")
    await kept.open("t")
    await kept.store.plan("t", "running", [QUESTION], PLAIN)
    await kept.store.end("t", "team")
    kept.clock.now = 20
    kept.start()
    assert (await kept.store.info("t", "team")).status == "ended"
    assert await kept.store.heard({"running": "t", "two": "gone"}) == ["running", "two"]
    with pytest.raises(SessionClosed):
        await kept.store.plan("t", "x", [QUESTION], PLAIN)
    await kept.call("two", [{"role": "user", "content": "other"}])
    with pytest.raises(SessionLimitReached, match=r"limits\.max_calls: 2 of 2"):
        await kept.store.plan("s", "three", [QUESTION], PLAIN)
    kept.clock.now = 50
    assert (await kept.store.info("s", "team")).status == "deadline"


async def test_sessions_expire_when_they_were_idle_for_long_after_a_start() -> None:
    kept = await Kept().open(limits=SessionLimits(idle_s=600))
    kept.clock.now = 5000
    kept.start()
    await kept.store.pass_time()
    kept.clock.now = 5599
    await kept.store.pass_time()
    assert [info.id for info in await kept.store.infos("team")] == ["s"]
    kept.clock.now = 5600
    await kept.store.pass_time()
    assert list(kept.storage.kept.records) == []
    with pytest.raises(SessionUnknown):
        await kept.store.samples("s", "team")


async def test_a_call_that_runs_while_the_store_dies_is_recorded_once() -> None:
    kept = await Kept().open(limits=SessionLimits(idle_s=60))
    for _ in range(2):
        # Its answer may be lost: it begins once.
        plan = await kept.store.plan("s", "one", [QUESTION], PLAIN)
    kept.start()
    for _ in range(3):
        kept.clock.now += 50
        await kept.store.pass_time()
        assert await kept.store.heard({"one": "s"}) == []
    for _ in range(2):
        await kept.add("one", plan)
    for _ in range(2):
        # An earlier store may have opened it, and died before it answered.
        info = await kept.store.open(opening("s"))
        assert (info.calls, info.calls_in_flight, info.branches, info.generated_tokens) == (1, 0, 1, 2)
        kept.start()
    assert set(kept.storage.kept.entries["s"]) == {EntryName("opened", 0), EntryName("call", 0)}


async def test_sessions_whose_entries_have_another_form_are_dropped() -> None:
    kept = await Kept().open("s")
    await kept.open("t")
    head = json.loads(kept.storage.kept.records["s"])
    del head["form"]
    kept.storage.kept.records["s"] = json.dumps(head).encode()
    kept.start()
    assert [info.id for info in await kept.store.infos("team")] == ["t"]
    await kept.store.pass_time()
    assert list(kept.storage.kept.records) == ["t"]


async def test_a_store_with_less_room_drops_what_was_used_longest_ago() -> None:
    kept = await Kept().open("s")
    for now, name in ((1, "t"), (2, "u")):
        kept.clock.now = now
        await kept.open(name)
    size_bytes = SESSION_BYTES + sum(len(data) for data in kept.storage.kept.entries["t"].values())
    for room, names in ((2, ["t", "u"]), (1, ["u"]), (9, ["u"])):
        kept.settings = SessionsSettings(max_bytes=room * size_bytes)
        kept.start()
        assert [info.id for info in await kept.store.infos("team")] == names
        await kept.store.pass_time()
        assert list(kept.storage.kept.records) == names


@virtual_time.synchronous
async def test_while_the_database_fails_nothing_is_shown_that_is_not_stored() -> None:
    kept = await Kept().open()
    plan = await kept.store.plan("s", "one", [QUESTION], PLAIN)
    kept.storage.is_failing = True
    calls = kept.add("one", plan), kept.store.reward("s", "team", SessionReward(reward=1.0)), kept.store.answer()
    refused = await asyncio.gather(*calls, kept.store.end("s", "team"), return_exceptions=True)
    assert [type(failure) for failure in refused] == [StorageFailed] * 4
    assert (await kept.store.samples("s", "team")).samples == []
    assert await kept.store.heard({"one": "s"}) == ["one"], "what nobody wants is aborted all the same"
    kept.storage.is_failing = False
    await kept.add("one", plan)
    await kept.store.end("s", "team")
    assert len((await kept.store.samples("s", "team")).samples) == 1
    kept.start()
    info = await kept.store.info("s", "team")
    assert (info.status, info.branches) == ("ended", 1)


@virtual_time.synchronous
async def test_a_session_that_cannot_be_read_is_read_when_the_database_is_back() -> None:
    kept = await Kept().open()
    await kept.call("one")
    kept.start()
    await kept.store.answer()
    kept.storage.is_failing = True
    with pytest.raises(StorageFailed):
        await kept.store.samples("s", "team")
    kept.storage.is_failing = False
    both = await asyncio.gather(kept.store.samples("s", "team"), kept.store.samples("s", "team"))
    assert [len(answer.samples) for answer in both] == [1, 1]


async def test_a_store_that_another_one_has_replaced_refuses_every_call() -> None:
    kept = await Kept().open()
    old, plan = kept.store, await kept.store.plan("s", "one", [QUESTION], PLAIN)
    kept.start()
    await kept.store.answer()
    new, kept.store = kept.store, old
    for call in (kept.add("one", plan), old.check_health(), old.info("s", "team")):
        with pytest.raises(StoreReplaced):
            await call
    assert (await new.samples("s", "team")).samples == []


@virtual_time.synchronous
async def test_calls_that_come_while_others_are_stored_are_stored_together() -> None:
    kept = await Kept().open()
    messages = {name: [{"role": "user", "content": name}] for name in "abc"}
    plans = {name: await kept.store.plan("s", name, messages[name], PLAIN) for name in "abc"}
    with patch.object(kept.storage, "apply", wraps=kept.storage.apply) as apply:
        kept.storage.gate.clear()
        adding = [asyncio.create_task(kept.add(name, plans[name], messages[name])) for name in "abcb"]
        await virtual_time.settled()
        kept.storage.gate.set()
        await asyncio.gather(*adding)
    assert [len(changes) for (changes,), _ in apply.call_args_list] == [3]
    samples = await kept.store.samples("s", "team")
    assert [sample.branch for sample in samples.samples] == ["a", "b", "c"]
    kept.start()
    assert await kept.store.samples("s", "team") == samples
