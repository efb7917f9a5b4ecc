"""Calls of model servers' APIs over a scripted Serve handle: their replica, their place in turn, and their retries."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.failures import GenerationLost, GenerationRejected, OtherVersionLoaded, RolloutFailure
from deployments.protocols import ReplicaLoad, SamplingOptions
from deployments.rpc import live_replicas
from deployments.rpc.live_replicas import record_live_replicas
from deployments.serving_records import ServedPart, ServedRequest, ServedTokens
from service.remote.generator import SERVE_RETRIES, RemoteGenerator
from tests import virtual_time
from tests.service.remote.scripted_handles import ScriptedResponse
from tests.service.scripted import DESCRIPTION

LOAD = ReplicaLoad(0)
WHOLE = [ServedPart(b"a", 200, "text/event-stream", load=LOAD), ServedPart(b"b", tokens=ServedTokens(3, 2), load=LOAD)]


class ScriptedCall:
    def __init__(self, parts: Sequence[ServedPart | RolloutFailure]) -> None:
        self._parts = list(parts)
        self.was_cancelled = False

    async def __anext__(self) -> ServedPart:
        await asyncio.sleep(1)
        if not self._parts:
            raise StopAsyncIteration
        part = self._parts.pop(0)
        if isinstance(part, RolloutFailure):
            raise part
        return part

    def cancel(self) -> None:
        self.was_cancelled = True


class ScriptedServingHandle:
    """Each call gives the next of `answers`, the last one again and again."""

    def __init__(self, *answers: Sequence[ServedPart | RolloutFailure]) -> None:
        self.deployment_id = object()
        self._answers = list(answers)
        self.sent: list[tuple[str, ServedRequest]] = []
        self.calls: list[ScriptedCall] = []
        self.describe = SimpleNamespace(remote=lambda: ScriptedResponse(replace(DESCRIPTION, max_num_seqs=1)))

    def options(self, session_id: str, stream: bool = False) -> Any:
        assert stream

        def remote(request: ServedRequest, _caller: str, _waiting: int) -> ScriptedCall:
            self.sent.append((session_id, request))
            self.calls.append(ScriptedCall(self._answers[0]))
            if len(self._answers) > 1:
                self._answers.pop(0)
            return self.calls[-1]

        return SimpleNamespace(serve=SimpleNamespace(remote=remote))


@pytest.fixture(autouse=True)
def _no_live_replicas() -> Iterator[None]:
    yield
    live_replicas._live_replicas.clear()


def generator_over(
    handle: ScriptedServingHandle, *replicas: str, window_factor: float | None = None
) -> RemoteGenerator:
    unchecked: Any = handle
    record_live_replicas(unchecked.deployment_id, replicas)
    return RemoteGenerator(unchecked, window_factor)


def request(name: str, rollout_id: str = "") -> ServedRequest:
    return ServedRequest(name, range(3), 8, (), SamplingOptions(), rollout_id=rollout_id or name, group=name)


async def answered(generator: RemoteGenerator, asked: ServedRequest) -> bytes:
    return b"".join([part.body async for part in generator.serve(asked)])


def test_an_answer_comes_in_its_parts_without_heartbeats() -> None:
    handle = ScriptedServingHandle([WHOLE[0], ServedPart(load=LOAD), WHOLE[1]])
    generator = generator_over(handle, "a")

    async def run() -> list[ServedPart]:
        return [part async for part in generator.serve(request("one"))]

    assert virtual_time.run(run()) == WHOLE
    assert not handle.calls[0].was_cancelled


def test_all_calls_of_a_session_go_to_one_replica_also_at_the_same_time() -> None:
    handle = ScriptedServingHandle(WHOLE)
    generator = generator_over(handle, "a", "b")

    async def run() -> None:
        await asyncio.gather(*(answered(generator, request(f"{number}", "session")) for number in range(5)))

    virtual_time.run(run())
    assert len({replica for replica, _ in handle.sent}) == 1
    assert len(handle.sent) == 5


def test_a_call_beyond_the_window_waits_for_its_turn() -> None:
    handle = ScriptedServingHandle(WHOLE)
    generator = generator_over(handle, "a", window_factor=1.0)

    async def run() -> float:
        await generator.describe()
        assert await asyncio.gather(*(answered(generator, request(name)) for name in ("one", "two"))) == [b"ab"] * 2
        return virtual_time.now()

    assert virtual_time.run(run()) == 7.0, "one second of describe, then three of each call"


def test_a_call_without_a_part_yet_is_made_again_elsewhere() -> None:
    handle = ScriptedServingHandle([GenerationLost("gone")], [OtherVersionLoaded("old")], WHOLE)
    assert virtual_time.run(answered(generator_over(handle, "a", "b"), request("one"))) == b"ab"
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
    handle = ScriptedServingHandle(answer)
    with pytest.raises(RolloutFailure):
        virtual_time.run(answered(generator_over(handle, "a"), request("one")))
    assert len(handle.sent) == attempts


def test_a_call_that_is_left_is_cancelled_and_frees_its_place() -> None:
    handle = ScriptedServingHandle(WHOLE)
    generator = generator_over(handle, "a", window_factor=1.0)

    async def run() -> bytes:
        await generator.describe()
        async with aclosing(generator.serve(request("one"))) as parts:
            await anext(parts)
        return await answered(generator, request("two"))

    assert virtual_time.run(run()) == b"ab"
    assert [call.was_cancelled for call in handle.calls] == [True, False]


def test_a_call_that_is_cancelled_while_it_waits_is_never_sent() -> None:
    handle = ScriptedServingHandle(WHOLE)
    generator = generator_over(handle, "a", window_factor=1.0)

    async def run() -> None:
        await generator.describe()
        first, second = (asyncio.create_task(answered(generator, request(name))) for name in ("one", "two"))
        await virtual_time.settled()
        second.cancel()
        assert await first == b"ab"

    virtual_time.run(run())
    assert [sent.generation_id for _, sent in handle.sent] == ["one"]


def test_a_replica_that_is_silent_is_lost() -> None:
    class SilentCall(ScriptedCall):
        async def __anext__(self) -> ServedPart:
            await asyncio.sleep(1000)
            raise StopAsyncIteration

    handle = ScriptedServingHandle(WHOLE)
    handle.options = lambda **_: SimpleNamespace(  # type: ignore[method-assign]
        serve=SimpleNamespace(remote=lambda *_: SilentCall([]))
    )
    with pytest.raises(GenerationLost, match="silent for 10 s"):
        virtual_time.run(answered(generator_over(handle, "a"), request("one")))
