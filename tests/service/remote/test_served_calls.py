"""Calls of model servers' APIs over a scripted Serve handle: their replica, their place in turn, and their retries."""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from itertools import zip_longest
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.failures import GenerationLost, GenerationRejected, OtherVersionLoaded, RolloutFailure
from deployments.protocols.generation import SamplingOptions
from deployments.protocols.model_server import CallsToAbort, ServedPart, ServedParts, ServedRequest, ServedTokens
from deployments.rpc.handle_calls import record_live_replicas
from service.remote.generator import SERVE_RETRIES, RemoteGenerator
from tests import virtual_time
from tests.fakes.serve_handle import LOAD, ScriptedCall, ScriptedHandle, ScriptedResponse
from tests.service.scripted import DESCRIPTION

WHOLE = [ServedPart(b"a", 200, "text/event-stream"), ServedPart(b"b", tokens=ServedTokens(3, 2))]
SERVE_ENDS_S = 1.0
"""After its last item."""
Answer = Sequence[ServedPart | RolloutFailure | None]
"""Its parts, or what ends it; `None` for a heartbeat."""


class ScriptedServingHandle(ScriptedHandle):
    """Each request gets the next of `answers`, the last one again and again, with a part of all in each item."""

    def __init__(self, *answers: Answer) -> None:
        super().__init__()
        self._answers = list(answers)
        self.sent: list[tuple[str, ServedRequest]] = []
        self.batches: list[list[str]] = []
        self.told: list[tuple[str, CallsToAbort]] = []
        """Of which calls each replica was told to abort."""
        self.gone: set[str] = set()
        """Replicas that do not answer."""
        self.describe = SimpleNamespace(remote=lambda: ScriptedResponse(replace(DESCRIPTION, max_num_seqs=1)))

    def on_serve(
        self, replica: str, requests: list[ServedRequest], _caller: str, _waiting: int, _named: str
    ) -> ScriptedCall:
        self.sent += [(replica, request) for request in requests]
        self.batches.append([request.generation_id for request in requests])
        answers = [self._answers.pop(0) if len(self._answers) > 1 else self._answers[0] for _ in requests]
        return self.start(items_of(requests, answers))

    def on_abort_calls(self, replica: str, calls: CallsToAbort) -> ScriptedResponse:
        self.told.append((replica, calls))
        return ScriptedResponse(GenerationLost("It is gone.") if replica in self.gone else None)


def items_of(requests: Sequence[ServedRequest], answers: Sequence[Answer]) -> list[ServedParts]:
    items = []
    for parts in zip_longest(*answers):
        item = ServedParts([], [], LOAD)
        for place, part in enumerate(parts):
            if isinstance(part, RolloutFailure):
                item.results.append((place, part))
            elif part is not None:
                item.parts.append((requests[place].generation_id, part))
                if part.tokens is not None:
                    item.results.append((place, part.tokens))
        items.append(item)
    return items


def generator_over(
    answers: Sequence[Answer], *replicas: str, window_factor: float | None = None
) -> tuple[ScriptedServingHandle, RemoteGenerator]:
    handle: Any = ScriptedServingHandle(*answers)
    record_live_replicas(handle.deployment_id, replicas)
    return handle, RemoteGenerator(handle, window_factor)


def request(name: str, rollout_id: str = "") -> ServedRequest:
    return ServedRequest(name, range(3), 8, (), SamplingOptions(), rollout_id=rollout_id or name, group=name)


async def answered(generator: RemoteGenerator, asked: ServedRequest) -> bytes:
    return b"".join([part.body async for part in generator.serve(asked)])


async def test_an_answer_comes_in_its_parts_without_heartbeats() -> None:
    handle, generator = generator_over([[WHOLE[0], None, WHOLE[1]]], "a")

    parts = [part async for part in generator.serve(request("one"))]
    await asyncio.sleep(SERVE_ENDS_S)
    assert parts == WHOLE
    assert not handle.calls[0].cancelled


async def test_all_calls_of_a_session_go_to_one_replica_also_at_the_same_time() -> None:
    handle, generator = generator_over([WHOLE], "a", "b")

    await asyncio.gather(*(answered(generator, request(f"{number}", "session")) for number in range(5)))
    assert len({replica for replica, _ in handle.sent}) == 1
    assert len(handle.sent) == 5


async def test_calls_of_one_moment_go_together_and_each_has_its_own_answer() -> None:
    other = [ServedPart(b"x", 400, "application/json", ServedTokens())]
    handle, generator = generator_over([WHOLE, other, [GenerationRejected("never")]], "a")

    calls = (answered(generator, request(name)) for name in ("one", "two", "three"))
    one, two, three = await asyncio.gather(*calls, return_exceptions=True)
    assert (one, two, str(three)) == (b"ab", b"x", "never")
    assert handle.batches == [["one", "two", "three"]]


async def test_a_call_that_is_left_is_aborted_while_others_go_on() -> None:
    handle, generator = generator_over([WHOLE], "a")

    one, two = (asyncio.create_task(answered(generator, request(name))) for name in ("one", "two"))
    await asyncio.sleep(1.5)
    one.cancel()
    assert await two == b"ab"
    assert handle.aborted == [("a", ["one"])]


async def test_a_call_beyond_the_window_waits_for_its_turn() -> None:
    _, generator = generator_over([WHOLE], "a", window_factor=1.0)

    await generator.describe()
    assert await asyncio.gather(*(answered(generator, request(name)) for name in ("one", "two"))) == [b"ab"] * 2
    assert virtual_time.now() == 5.0, "one second of describe, then two of each call"


def test_a_call_without_a_part_yet_is_made_again_elsewhere() -> None:
    handle, generator = generator_over([[GenerationLost("gone")], [OtherVersionLoaded("old")], WHOLE], "a", "b")
    assert virtual_time.run(answered(generator, request("one"))) == b"ab"
    assert [sent.generation_id for _, sent in handle.sent] == ["one", "one.1", "one.2"]
    assert handle.sent[0][0] != handle.sent[1][0]


@pytest.mark.parametrize(
    ("answer", "attempts"),
    [
        ([GenerationLost("gone")], SERVE_RETRIES + 1),
        ([GenerationRejected("never")], 1),
        ([WHOLE[0], GenerationLost("gone")], 1),
    ],
    ids=["nobody answers", "it is refused", "a part has been sent"],
)
def test_a_failure_that_no_retry_mends_is_raised(answer: list[Any], attempts: int) -> None:
    handle, generator = generator_over([answer], "a")
    with pytest.raises(RolloutFailure):
        virtual_time.run(answered(generator, request("one")))
    assert len(handle.sent) == attempts


async def test_a_call_that_is_left_is_cancelled_and_frees_its_place() -> None:
    handle, generator = generator_over([WHOLE], "a", window_factor=1.0)

    await generator.describe()
    async with aclosing(generator.serve(request("one"))) as parts:
        await anext(parts)
    whole = await answered(generator, request("two"))
    await asyncio.sleep(SERVE_ENDS_S)
    assert whole == b"ab"
    assert [call.cancelled for call in handle.calls] == [True, False]


ALL_CALLS = CallsToAbort(None, "", "ingress", 1.0)


async def test_an_abort_goes_to_every_replica_and_fails_where_none_answers() -> None:
    handle, generator = generator_over([WHOLE], "a", "b")
    handle.gone = {"a"}
    await generator.abort_calls(ALL_CALLS)
    assert handle.told == [("a", ALL_CALLS), ("b", ALL_CALLS)]
    handle.gone = {"a", "b"}
    with pytest.raises(GenerationLost):
        await generator.abort_calls(ALL_CALLS)
