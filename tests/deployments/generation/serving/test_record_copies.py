"""Copies of records beside the engine: they plan as the store's record does, or not at all."""

import asyncio
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from deployments.generation.serving import record_copies
from deployments.generation.serving.record_copies import RecordCopies
from deployments.sessions.records import ChatContext, EngineCall
from deployments.sessions.session_record import SessionRecord
from tests.deployments.sessions.harness import FakeEngine, Reply
from tests.deployments.sessions.renderer import PLAIN, small
from tests.deployments.sessions.test_session_laws import Agent

QUESTION = {"role": "user", "content": "What is 2 + 3?"}
MORE = {"role": "user", "content": "And 1 + 1?"}


def conversation(calls: int) -> tuple[FakeEngine, list[dict[str, Any]]]:
    """An engine after so many calls, and the messages of the next one."""
    engine, messages = FakeEngine(small(), is_parsed=False), [QUESTION]
    for number in range(calls):
        made = engine.call(messages, Reply(f"answer {number}"))
        messages = [*messages, dict(made.message), MORE]
    return engine, messages


async def planned(copies: RecordCopies, messages: Any, context: ChatContext = PLAIN, in_thread: bool = False) -> Any:
    return await copies.plan("s", messages, context, None, in_thread)


@given(data=st.data())
def test_a_copy_with_all_calls_of_the_record_plans_as_the_record_does(data: st.DataObject) -> None:
    engine = FakeEngine(small(), is_parsed=False)
    agent = Agent(data, engine, has_tools=False)
    for _ in range(data.draw(st.integers(1, 6))):
        agent.play()
    asked = data.draw(st.sampled_from(agent.conversations)).with_new(MORE)

    async def check() -> None:
        copies = RecordCopies()
        for place, call in enumerate(engine.calls):
            await copies.add("s", call, place)
        expected = engine.record.plan(asked.messages, asked.context), len(engine.calls)
        for in_thread in (False, True):
            assert await planned(copies, asked.messages, asked.context, in_thread) == expected

    asyncio.run(check())


def test_a_session_whose_first_calls_another_replica_has_made_has_no_copy() -> None:
    engine, messages = conversation(2)

    async def check() -> None:
        copies = RecordCopies()
        await copies.add("s", engine.calls[1], 1)
        assert await planned(copies, messages) is None
        await copies.add("s", engine.calls[0], None)
        assert await planned(copies, messages) is None, "the store has not added it"

    asyncio.run(check())


def test_a_copy_that_misses_a_call_is_dropped() -> None:
    engine, messages = conversation(3)

    async def check() -> None:
        copies = RecordCopies()
        await copies.add("s", engine.calls[0], 0)
        assert copies.has_call("s", engine.calls[0].id)
        await copies.add("s", engine.calls[2], 2)
        assert await planned(copies, messages) is None
        assert not copies.has_call("s", engine.calls[0].id)

    asyncio.run(check())


def test_nothing_is_added_to_a_record_while_a_thread_plans_with_it(monkeypatch: Any) -> None:
    engine, messages = conversation(2)
    planning, may_go_on = asyncio.Event(), asyncio.Event()
    plan = SessionRecord.plan

    async def check() -> None:
        loop = asyncio.get_running_loop()

        def slow_plan(record: SessionRecord, *given: Any) -> Any:
            loop.call_soon_threadsafe(planning.set)
            asyncio.run_coroutine_threadsafe(may_go_on.wait(), loop).result()
            return plan(record, *given)

        monkeypatch.setattr(SessionRecord, "plan", slow_plan)
        copies = RecordCopies()
        await copies.add("s", engine.calls[0], 0)
        asking = asyncio.create_task(planned(copies, messages[:3], in_thread=True))
        await planning.wait()
        adding = asyncio.create_task(copies.add("s", engine.calls[1], 1))
        await asyncio.sleep(0.01)
        assert not adding.done()
        may_go_on.set()
        found, known = await asking
        await adding
        assert (found.covered, known) == (2, 1)

    asyncio.run(check())


def test_copies_that_are_too_large_or_idle_for_long_are_forgotten_the_one_used_longest_ago_first() -> None:
    engine, _ = conversation(1)
    [call] = engine.calls
    now = 0.0

    async def kept(copies: RecordCopies, *names: str) -> list[bool]:
        return [copies.has_call(name, call.id) for name in names]

    async def check() -> None:
        nonlocal now
        one = SessionRecord()
        one.add(call)
        copies = RecordCopies(most_bytes=2 * one.size_bytes, now_s=lambda: now)
        for name in "ab":
            await copies.add(name, call, 0)
        await copies.plan("a", [QUESTION], PLAIN, None, in_thread=False)
        await copies.add("c", call, 0)
        assert await kept(copies, "a", "b", "c") == [True, False, True]
        now = record_copies.FORGET_AFTER_S
        await copies.add("d", call, 0)
        assert await kept(copies, "a", "c", "d") == [False, False, True]

    asyncio.run(check())


def test_a_call_that_is_too_large_for_all_copies_leaves_none() -> None:
    engine, _ = conversation(1)

    async def check() -> None:
        copies = RecordCopies(most_bytes=1)
        call: EngineCall = engine.calls[0]
        await copies.add("s", call, 0)
        assert not copies.has_call("s", call.id)

    asyncio.run(check())
