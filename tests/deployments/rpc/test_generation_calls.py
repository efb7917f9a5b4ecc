"""Batches of generations on one replica: answered as they finish, aborted one by one."""

import asyncio
from contextlib import aclosing

from deployments.failures import GenerationLost, GenerationRejected, RolloutFailure
from deployments.protocols import Generation, GenerationRequest, SamplingOptions
from deployments.rpc.generation_calls import GenerationCalls


class Panic(BaseException):
    """As libraries in Rust raise it."""


class Scripted:
    """Ends a generation when its name is set free; `lost` and `bug` raise."""

    def __init__(self) -> None:
        self.free: dict[str, asyncio.Event] = {}
        self.cancelled: list[str] = []

    async def generate(self, request: GenerationRequest) -> Generation:
        name = request.request_id
        if name == "rejected":
            raise GenerationRejected("too long")
        if name == "bug":
            raise KeyError("bug")
        if name == "panic":
            raise Panic
        try:
            await self.free.setdefault(name, asyncio.Event()).wait()
        except asyncio.CancelledError:
            self.cancelled.append(name)
            raise
        return Generation([1], [0.0], "stop")


def requests(*names: str) -> list[GenerationRequest]:
    return [GenerationRequest(name, [1], 1, (), SamplingOptions()) for name in names]


DONE = Generation([1], [0.0], "stop")


def test_those_that_finish_in_one_instant_come_back_together_and_the_others_later() -> None:
    async def run() -> None:
        engine = Scripted()
        async with aclosing(GenerationCalls(engine.generate).answers(requests("a", "b", "c"))) as answers:
            first = asyncio.ensure_future(anext(answers))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            engine.free["c"].set()
            engine.free["a"].set()
            assert sorted(await first, key=lambda answer: answer[0]) == [(0, DONE), (2, DONE)]
            engine.free["b"].set()
            assert await anext(answers) == [(1, DONE)]
            assert await anext(answers, None) is None

    asyncio.run(run())


def test_a_failure_is_the_answer_of_its_own_generation_alone_and_can_always_travel() -> None:
    async def run() -> dict[int, Generation | RolloutFailure]:
        calls = GenerationCalls(Scripted().generate)
        return {
            place: answer
            async for batch in calls.answers(requests("rejected", "bug", "panic"))
            for place, answer in batch
        }

    answered = asyncio.run(run())
    assert isinstance(answered[0], GenerationRejected)
    assert type(answered[1]) is RolloutFailure
    assert str(answered[1]) == "KeyError: 'bug'"
    assert str(answered[2]) == "Panic was raised."


def test_an_aborted_generation_ends_and_its_siblings_go_on() -> None:
    async def run() -> tuple[Scripted, list[tuple[int, Generation | RolloutFailure]]]:
        engine = Scripted()
        calls = GenerationCalls(engine.generate)
        async with aclosing(calls.answers(requests("a", "b"))) as answers:
            first = asyncio.ensure_future(anext(answers))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            calls.abort(["a", "never heard of"])
            aborted = await first
            engine.free["b"].set()
            assert await anext(answers) == [(1, DONE)]
        return engine, aborted

    engine, [(place, answer)] = asyncio.run(run())
    assert (place, type(answer), engine.cancelled) == (0, GenerationLost, ["a"])


def test_a_call_that_is_closed_ends_all_of_its_generations() -> None:
    async def run() -> Scripted:
        engine = Scripted()
        answers = GenerationCalls(engine.generate).answers(requests("a", "b"))
        first = asyncio.ensure_future(anext(answers))
        await asyncio.sleep(0.001)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await answers.aclose()
        await asyncio.sleep(0.001)
        return engine

    assert sorted(asyncio.run(run()).cancelled) == ["a", "b"]
