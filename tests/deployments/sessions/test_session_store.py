"""The session store: calls that begin and end, records, rewards, expiry, and replicas that are gone."""

import asyncio
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from deployments.protocols.generation import WeightSpan, packed_ids, packed_logprobs
from deployments.sessions.codec import OPENED, session_of, written
from deployments.sessions.records import (
    ChatContext,
    EngineCall,
    GeneratedMessage,
    OpenSession,
    Plan,
    RenderedMessage,
    SessionClosed,
    SessionLimitReached,
    SessionUnknown,
)
from deployments.sessions.session_table import SessionsSettings
from deployments.sessions.store import SessionStore
from rollout_client.contract.sessions import SessionLimits, SessionRequest
from tests.fakes.storage import ScriptedStorage

pytestmark = pytest.mark.true_clock

QUESTION = {"role": "user", "content": "Q"}
ANSWER = {"role": "assistant", "content": "A"}
PLAIN = ChatContext()


class Clock:
    """Of the seconds since 1970, and of monotonic ones that begin anew with each store."""

    def __init__(self) -> None:
        self.now = 0.0
        self.step_s = 0.0
        """How far the wall clock was set forward."""

    def time_s(self) -> float:
        return self.now + self.step_s


class Kept:
    """A store with one session, `s`, of the key `team`."""

    def __init__(self, settings: SessionsSettings | None = None) -> None:
        self.clock = Clock()
        self.settings = settings or SessionsSettings(lease_s=10)
        self.storage = ScriptedStorage()
        self.start()

    def start(self) -> None:
        """A store dies with all that it has in memory, and another one starts."""
        self.storage = ScriptedStorage(self.storage.kept)
        started_at = self.clock.now
        self.store = SessionStore(self.settings, self.storage, lambda: self.clock.now - started_at, self.clock.time_s)

    async def open(self, name: str = "s", **request: Any) -> "Kept":
        await self.store.open(opening(name, **request))
        return self

    async def call(self, name: str, messages: list[dict[str, Any]] | None = None) -> GeneratedMessage:
        """A call that generates ids 7 and 8 after prompt 1 ... 5."""
        given = messages or [QUESTION]
        return await self.add(name, await self.store.plan("s", name, given, PLAIN), given)

    async def add(self, name: str, plan: Plan, messages: list[dict[str, Any]] | None = None) -> GeneratedMessage:
        made = GeneratedMessage(
            name, ANSWER, "A", packed_ids([7, 8]), packed_logprobs([-0.5, -1.0]), "stop", (WeightSpan("3", 0, 2),)
        )
        await self.store.add("s", call_of(name, plan, messages or [QUESTION], made))
        return made


def opening(name: str, namespace: str = "team", **request: Any) -> OpenSession:
    return OpenSession(name, namespace, "hash", f"http://service/v1/sessions/{name}", SessionRequest(**request))


def call_of(name: str, plan: Plan, messages: list[dict[str, Any]], *made: GeneratedMessage) -> EngineCall:
    new = [RenderedMessage(message, packed_ids([1, 2, 3, 4])) for message in messages[plan.covered :]]
    return EngineCall(name, PLAIN, plan, new, packed_ids([5]), made)


async def test_what_was_generated_is_in_the_samples_of_its_branch() -> None:
    kept = await Kept().open()
    await kept.call("one")
    answered = await kept.store.samples("s", "team")
    [sample] = answered.samples
    assert (answered.status, answered.policy.oldest, answered.policy.newest) == ("open", "3", "3")
    assert sample.branch == "one"
    assert [list(message.token_ids) for message in sample.message_log] == [[1, 2, 3, 4, 5], [7, 8]]
    info = await kept.store.info("s", "team")
    assert (info.calls, info.calls_in_flight, info.branches) == (1, 0, 1)
    assert (info.generated_tokens, info.total_tokens) == (2, 7)


async def test_a_call_whose_session_is_deleted_meanwhile_is_not_recorded() -> None:
    kept = await Kept().open()
    plans = {name: await kept.store.plan("s", name, [QUESTION], PLAIN) for name in ("one", "two")}
    kept.storage.gate.clear()
    started = []
    for work in (kept.add("one", plans["one"]), kept.add("two", plans["two"]), kept.store.delete("s", "team")):
        started.append(asyncio.create_task(work))
        await asyncio.sleep(0.01)
    kept.storage.gate.set()
    being_stored, waiting, deleted = await asyncio.gather(*started, return_exceptions=True)
    assert (type(being_stored), type(waiting), deleted) == (SessionUnknown, SessionUnknown, None)


async def test_calls_that_come_together_have_a_result_or_a_failure_each() -> None:
    kept = await Kept().open(limits=SessionLimits(max_calls=2))
    asked = (("s", "one"), ("s", "two"), ("gone", "x"), ("s", "y"))
    given = [(session, name, [QUESTION], PLAIN) for session, name in asked]
    *plans, unknown, refused = await kept.store.batched("plan", given)
    assert (type(unknown), type(refused)) == (SessionUnknown, SessionLimitReached)
    made = GeneratedMessage("one", ANSWER, "A", packed_ids([7]), packed_logprobs([-1.0]), "stop")
    calls = [("s", call_of(name, plan, [QUESTION], made)) for name, plan in zip(("one", "two"), plans, strict=True)]
    *added, unknown = await kept.store.batched("add", [*calls, ("gone", calls[0][1])])
    assert (added, type(unknown)) == ([None, None], SessionUnknown)
    await kept.store.end("s", "team")
    [closed] = await kept.store.batched("plan", [("s", "three", [QUESTION], PLAIN)])
    assert isinstance(closed, SessionClosed)


async def test_a_session_is_its_callers_alone() -> None:
    kept = await Kept().open()
    for asked in (kept.store.info, kept.store.samples, kept.store.drift, kept.store.end, kept.store.delete):
        with pytest.raises(SessionUnknown):
            await asked("s", "other")
    assert [info.id for info in await kept.store.infos("team")] == ["s"]
    assert await kept.store.infos("other") == []


@pytest.mark.parametrize(("how", "says"), [("ended", "has ended"), ("deadline", "The deadline of session 's' is over")])
async def test_a_session_that_is_over_aborts_its_calls_and_takes_no_more(how: str, says: str) -> None:
    kept = await Kept().open(deadline_s=5)
    await kept.store.plan("s", "one", [QUESTION], PLAIN)
    kept.clock.now = 4.9
    await kept.store.pass_time()
    assert await kept.store.heard({"one": "s"}) == []
    if how == "ended":
        await kept.store.end("s", "team")
    else:
        kept.clock.now = 5
        await kept.store.pass_time()
    assert await kept.store.heard({"one": "s"}) == ["one"]
    assert (await kept.store.info("s", "team")).status == how
    with pytest.raises(SessionClosed, match=says):
        await kept.store.plan("s", "two", [QUESTION], PLAIN)
    assert (await kept.store.samples("s", "team")).samples == []


async def test_a_call_of_a_silent_replica_ends_until_it_is_heard_again() -> None:
    kept = await Kept().open()
    plan = await kept.store.plan("s", "one", [QUESTION], PLAIN)
    kept.clock.now = 9
    await kept.store.heard({"one": "s"})
    for now, in_flight in ((19, 1), (19.5, 0)):
        kept.clock.now = now
        await kept.store.pass_time()
        assert (await kept.store.info("s", "team")).calls_in_flight == in_flight
    assert await kept.store.heard({"one": "s"}) == []
    await kept.add("one", plan)
    info = await kept.store.info("s", "team")
    assert (info.calls_in_flight, info.branches) == (0, 1)


async def test_a_deleted_session_is_gone_with_its_record_and_calls_are_aborted() -> None:
    kept = await Kept().open()
    await kept.call("one")
    await kept.store.plan("s", "two", [QUESTION], PLAIN)
    await kept.store.delete("s", "team")
    assert await kept.store.heard({"two": "s"}) == ["two"]
    kept.start()
    with pytest.raises(SessionUnknown):
        await kept.store.samples("s", "team")


async def test_a_call_that_has_ended_does_not_begin_again_by_a_late_word() -> None:
    kept = await Kept().open(limits=SessionLimits(max_calls=1))
    await kept.store.plan("s", "one", [QUESTION], PLAIN)
    await kept.store.end_call("s", "one")
    await kept.store.heard({"one": "s", "of an earlier store": "s"})
    info = await kept.store.info("s", "team")
    assert (info.calls, info.calls_in_flight) == (0, 0)
    await kept.call("two")


@pytest.mark.parametrize("step_s", [1000, -1000])
async def test_a_wall_clock_that_is_set_ends_no_call_and_drops_no_session(step_s: float) -> None:
    kept = await Kept().open(limits=SessionLimits(idle_s=60), deadline_s=100)
    await kept.open("idle", limits=SessionLimits(idle_s=60))
    plan = await kept.store.plan("s", "one", [QUESTION], PLAIN)
    kept.clock.step_s = step_s
    await kept.store.pass_time()
    assert await kept.store.heard({"one": "s"}) == []
    [busy, idle] = await kept.store.infos("team")
    assert (busy.status, busy.calls_in_flight) == ("open", 1)
    assert idle.expires_at == datetime.fromtimestamp(60, UTC)
    await kept.add("one", plan)
    kept.clock.now = 99
    assert (await kept.store.info("s", "team")).status == "open"
    kept.clock.now = 100
    assert (await kept.store.info("s", "team")).status == "deadline"


def test_what_a_session_was_opened_with_comes_back_from_storage_whole() -> None:
    opened = replace(opening("s", priority="batch"), share_id="request")
    assert session_of({OPENED: written(opened)}).opened == opened
