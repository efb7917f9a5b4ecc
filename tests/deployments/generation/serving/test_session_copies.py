"""Calls that are planned with the replica's copy of the record, before the store knows of them."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from deployments.generation.serving.asgi_calls import running_calls, session_answer_parts
from deployments.generation.serving.record_copies import RecordOutdated
from deployments.generation.serving.served_call import CURRENT_CALL, ServedCall
from deployments.protocols.generation import SamplingOptions
from deployments.protocols.model_server import ServedRequest
from deployments.sessions.failures import SessionClosed
from deployments.sessions.records import ChatContext, OpenSession
from deployments.sessions.settings import SessionsSettings
from deployments.sessions.store import SessionStore
from rollout_client.contract.base import RolloutDemand
from rollout_client.contract.sessions import SessionRequest
from tests.deployments.generation.serving.test_session_call import MORE, QUESTION, Replica, generate
from tests.deployments.sessions.renderer import PLAIN, small
from tests.deployments.storage.scripted_storage import ScriptedStorage
from tests.virtual_time import runs

FIVE = {"role": "assistant", "content": "5"}
NEXT = [QUESTION, FIVE, MORE]
THREE = ServedRequest(
    "three", range(3), 8, (), SamplingOptions(), session_id="s", endpoint="chat/completions", body=b"{}"
)


class CountedPlans(SessionStore):
    """A store that counts what it plans."""

    planned = 0

    async def plan(self, *given: Any) -> Any:
        self.planned += 1
        return await super().plan(*given)


class CountingReplica(Replica):
    def __init__(self) -> None:
        super().__init__()
        self.store: CountedPlans = CountedPlans(SessionsSettings(), ScriptedStorage())
        unchecked: Any = self.store
        self.calls._store = unchecked


async def replica_with_copy(request: SessionRequest | None = None) -> CountingReplica:
    """After one call."""
    replica = CountingReplica()
    await replica.open(request)
    await played(replica, "one", [QUESTION], "5")
    return replica


async def played(replica: Replica, name: str, messages: list[Any], answer: str, is_streamed: bool = False) -> list[int]:
    """A call from its prompt, which is returned, to its record."""
    call = replica.call(name)
    assert call.session is not None
    prompt = await call.session.prepare(messages, PLAIN, is_streamed)
    generate(call, answer)
    await call.session.wait_until_confirmed()
    await call.session.record({0: {"role": "assistant", "content": answer.strip()}})
    return list(prompt)


async def other_replica_plays(replica: Replica, name: str, messages: list[Any], answer: str) -> None:
    other = Replica()
    other.store = replica.store
    unchecked: Any = replica.store
    other.calls._store = unchecked
    await played(other, name, messages, answer)


@runs
async def test_the_second_call_of_a_session_is_planned_without_the_store_which_then_knows_of_it() -> None:
    replica = await replica_with_copy()
    fresh = await replica_with_copy()
    call = replica.call("two")
    assert call.session is not None
    prompt = await call.session.prepare(NEXT, PLAIN, is_streamed=False)
    assert (replica.store.planned, fresh.store.planned) == (1, 1)
    assert list(prompt) == await played(fresh, "two", NEXT, "2", is_streamed=True)
    assert fresh.store.planned == 2, "a stream waits for the store"
    await call.session.wait_until_confirmed()
    assert (await replica.store.info("s", "")).calls_in_flight == 1
    generate(call, "2")
    await call.session.record({0: {"role": "assistant", "content": "2"}})
    assert (await replica.samples()) == (await fresh.samples())
    assert (await replica.store.info("s", "")).calls_in_flight == 0


@runs
async def test_the_copy_knows_of_named_policies_which_versions_are_the_oldest() -> None:
    replica = await replica_with_copy(SessionRequest(policy=RolloutDemand(name="run-b")))
    call = replica.call("two")
    assert call.session is not None
    call.request = ServedRequest("two", range(3), 8, (), SamplingOptions(), session_id="s", policy="run-b")
    await call.session.prepare(NEXT, PLAIN, is_streamed=False)
    assert call.oldest_version is None, "the tokens are those of the policy without a name"


@runs
async def test_a_call_that_another_replica_has_answered_meanwhile_makes_the_copy_outdated() -> None:
    replica = await replica_with_copy()
    await other_replica_plays(replica, "two", NEXT, "2")
    call = replica.call("three")
    assert call.session is not None
    await call.session.prepare([*NEXT, {"role": "assistant", "content": "2"}, MORE], PLAIN, is_streamed=False)
    with pytest.raises(RecordOutdated):
        await call.session.wait_until_confirmed()
    planned = replica.store.planned
    await played(replica, "four", NEXT, "2")
    assert replica.store.planned == planned + 1, "there is no copy any longer"


@runs
async def test_calls_that_this_replica_makes_at_the_same_time_make_no_copy_outdated() -> None:
    replica = await replica_with_copy()
    calls = {name: replica.call(name) for name in ("two", "three")}
    for call in calls.values():
        assert call.session is not None
        await call.session.prepare(NEXT, PLAIN, is_streamed=False)
        generate(call, "2")
    for call in calls.values():
        assert call.session is not None
        await call.session.wait_until_confirmed()
        await call.session.record({0: {"role": "assistant", "content": "2"}})
    assert await played(replica, "four", NEXT, "2") == await played(replica, "five", NEXT, "2", is_streamed=True)
    assert len(await replica.samples()) == 4


@runs
async def test_a_call_of_this_replica_that_the_store_has_and_the_copy_not_yet_makes_no_copy_outdated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replica = await replica_with_copy()
    add, is_added, may_answer = replica.store.add, asyncio.Event(), asyncio.Event()

    async def late_add(*given: Any) -> Any:
        place = await add(*given)
        is_added.set()
        await may_answer.wait()
        return place

    monkeypatch.setattr(replica.store, "add", late_add)
    adding = asyncio.create_task(played(replica, "two", NEXT, "2"))
    await is_added.wait()
    call = replica.call("three")
    assert call.session is not None
    await call.session.prepare(NEXT, PLAIN, is_streamed=False)
    await call.session.wait_until_confirmed()
    may_answer.set()
    await adding


@runs
async def test_a_copy_of_a_record_that_the_store_has_lost_is_outdated() -> None:
    replica = await replica_with_copy()
    emptied = CountedPlans(SessionsSettings(), ScriptedStorage())
    await emptied.open(OpenSession("s", "", "", "http://service", SessionRequest()))
    unchecked: Any = emptied
    replica.calls._store = unchecked
    call = replica.call("two")
    assert call.session is not None
    await call.session.prepare(NEXT, PLAIN, is_streamed=False)
    with pytest.raises(RecordOutdated):
        await call.session.wait_until_confirmed()


@runs
async def test_a_call_that_the_session_refuses_is_not_answered_and_leaves_nothing() -> None:
    replica = await replica_with_copy()
    await replica.store.end("s", "")
    call = replica.call("two")
    assert call.session is not None
    await call.session.prepare(NEXT, PLAIN, is_streamed=False)
    with pytest.raises(SessionClosed):
        await call.session.wait_until_confirmed()
    call.session.leave()
    await replica.calls.tasks.ended()
    info = await replica.store.info("s", "")
    assert (info.calls, info.calls_in_flight, info.branches) == (1, 0, 1)


@runs
async def test_a_call_that_is_left_before_the_store_knows_of_it_counts_no_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replica = await replica_with_copy()
    begin, may_begin = replica.store.begin, asyncio.Event()

    async def late_begin(*given: Any) -> Any:
        await may_begin.wait()
        return await begin(*given)

    monkeypatch.setattr(replica.store, "begin", late_begin)
    call = replica.call("two")
    assert call.session is not None
    await call.session.prepare(NEXT, PLAIN, is_streamed=False)
    call.session.leave()
    await asyncio.sleep(0)
    may_begin.set()
    await replica.calls.tasks.ended()
    assert (await replica.store.info("s", "")).calls_in_flight == 0


@runs
async def test_an_answer_whose_copy_was_outdated_is_made_again_with_the_plan_of_the_store() -> None:
    replica = await replica_with_copy()
    await other_replica_plays(replica, "two", NEXT, " 2")
    messages = [*NEXT, {"role": "assistant", "content": "2"}, MORE]
    prompts, in_flight = list[list[int]](), list[int]()

    async def note(prompt: Any) -> None:
        prompts.append(list(prompt))
        await asyncio.sleep(0.01)
        in_flight.append((await replica.store.info("s", "")).calls_in_flight)

    app = answering_app(replica, messages, note)
    parts = [part async for part in session_answer_parts(app, THREE, "s", replica.calls)]
    assert b"".join(part.body for part in parts) == b"7"
    assert in_flight == [1, 1], "what is left of the first time does not end the second"
    outdated, exact = (small().decode(prompt) for prompt in prompts)
    assert (outdated.count(" 2\n"), exact.count(" 2\n")) == (0, 1), (outdated, exact)
    info = await replica.store.info("s", "")
    assert (info.calls, info.calls_in_flight, info.branches) == (3, 0, 1), "each is recorded once, in one conversation"


@runs
async def test_an_outdated_call_that_is_left_at_whatever_step_ends_and_what_it_generated_is_recorded() -> None:
    steps, has_ended = 0, False
    while not has_ended:
        replica = await replica_with_copy()
        await other_replica_plays(replica, "two", NEXT, " 2")
        app = answering_app(replica, [*NEXT, {"role": "assistant", "content": "2"}, MORE])
        parts = session_answer_parts(app, THREE, "s", replica.calls)
        reading = asyncio.create_task(anext(parts))
        for _ in range(steps):
            await asyncio.sleep(0)
        has_ended = reading.done()
        reading.cancel()
        await asyncio.wait([reading])
        await parts.aclose()
        while running_calls or replica.calls.tasks:
            await running_calls.ended()
            await replica.calls.tasks.ended()
        info = await replica.store.info("s", "")
        assert (info.calls_in_flight, replica.calls._in_flight) == (0, {}), f"left after {steps} steps"
        steps += 1
    assert steps > 10


def answering_app(
    replica: Replica, messages: list[Any], note: Callable[[Any], Awaitable[None]] | None = None, refuses: bool = False
) -> Any:
    """Does as vLLM's layers do with the recording client, and answers 7; or refuses the first prompt.

    Args: `note` is told of each prompt.
    """
    prompts = list[Any]()

    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        call: ServedCall = CURRENT_CALL.get()
        replica._running[call.request.generation_id] = call
        assert call.session is not None
        prompts.append(await call.session.prepare(messages, ChatContext(), is_streamed=False))
        if note is not None:
            await note(prompts[-1])
        if refuses and len(prompts) == 1:
            await send({"type": "http.response.start", "status": 400, "headers": []})
            await send({"type": "http.response.body", "body": b"too long"})
            return
        generate(call, "7")
        try:
            await call.session.wait_until_confirmed()
        except RecordOutdated as failure:
            call.note_failure(failure)
        else:
            await call.session.record({0: {"role": "assistant", "content": "7"}})
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"7"})

    return app


@pytest.mark.parametrize(("is_outdated", "answer"), [(True, (200, b"7")), (False, (400, b"too long"))])
@runs
async def test_a_prompt_is_refused_for_good_only_if_its_copy_was_right(
    is_outdated: bool, answer: tuple[int, bytes]
) -> None:
    replica = await replica_with_copy()
    if is_outdated:
        await other_replica_plays(replica, "two", NEXT, "2")
    app = answering_app(replica, NEXT, refuses=True)
    [part] = [part async for part in session_answer_parts(app, THREE, "s", replica.calls)]
    assert (part.status, part.body) == answer


@runs
async def test_what_the_engine_made_for_a_call_that_the_session_refuses_is_not_recorded() -> None:
    replica = await replica_with_copy()
    await replica.store.end("s", "")
    call = replica.call("two")
    assert call.session is not None
    await call.session.prepare(NEXT, PLAIN, is_streamed=False)
    generate(call, "2", None)
    call.session.leave()
    await replica.calls.tasks.ended()
    info = await replica.store.info("s", "")
    assert (info.calls, info.calls_in_flight, info.branches) == (1, 0, 1)


@runs
async def test_a_call_that_adds_nothing_leaves_the_copy() -> None:
    replica = await replica_with_copy()
    call = replica.call("two")
    assert call.session is not None
    await call.session.prepare(NEXT, PLAIN, is_streamed=False)
    await call.session.wait_until_confirmed()
    await call.session.record({})
    await played(replica, "three", NEXT, "2")
    assert replica.store.planned == 1
