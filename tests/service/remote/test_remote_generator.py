"""What is asked for in one instant, over a scripted Serve handle."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from grpc import RpcError
from ray.exceptions import ActorDiedError
from ray.serve.exceptions import RayServeException

from deployments.failures import EnvironmentBroken, EnvironmentLost, GenerationLost, Overloaded
from deployments.protocols import GenerationRequest, SamplingOptions, StepRequest
from deployments.rpc.live_replicas import note_replicas
from rollout_env import StepOutcome
from service.remote.environment import RemoteEnvironment
from service.remote.generator import RemoteGenerator
from service.rollouts.loop import RolloutContext
from service.rollouts.schedule import LockstepSchedule
from tests.service.rollouts.playing import collect
from tests.service.scripted import EpisodeRecipe, ScriptedGenerator, outcome


class ScriptedCall:
    """A streaming call: gives its batches one by one, raises what is no batch, and remembers that it was cancelled."""

    def __init__(self, batches: list[Any]) -> None:
        self._batches = batches
        self.answers_nothing = False
        self.cancelled = False

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        await asyncio.sleep(3600 if self.answers_nothing else 0.01)
        if not self._batches:
            raise StopAsyncIteration
        batch = self._batches.pop(0)
        if isinstance(batch, Exception):
            raise batch
        return batch

    def cancel(self) -> None:
        self.cancelled = True


class ScriptedHandle:
    """A Serve handle whose calls answer as scripted, by default every step at once."""

    def __init__(self, *script: Any) -> None:
        self._script = list(script)
        self.requests: list[list[StepRequest]] = []
        self.calls: list[ScriptedCall] = []
        self.step = self

    def options(self, *, stream: bool) -> "ScriptedHandle":
        assert stream
        return self

    def remote(self, requests: list[StepRequest]) -> ScriptedCall:
        self.requests.append(requests)
        batches = self._script.pop(0) if self._script else [[(place, outcome()) for place in range(len(requests))]]
        if isinstance(batches, Exception):
            raise batches
        self.calls.append(ScriptedCall(batches))
        return self.calls[-1]


def hop(handle: ScriptedHandle) -> RemoteEnvironment:
    unchecked: Any = handle
    return RemoteEnvironment("task", unchecked)


def request(name: str) -> StepRequest:
    return StepRequest([{"role": "assistant", "content": name}], {})


def step_all(handle: ScriptedHandle, *names: str) -> list[StepOutcome | BaseException]:
    async def together() -> list[StepOutcome | BaseException]:
        environment = hop(handle)
        return await asyncio.gather(*(environment.step(request(name)) for name in names), return_exceptions=True)

    return asyncio.run(together())


def test_steps_of_one_instant_travel_in_one_call_and_each_gets_its_own_answer() -> None:
    broken = EnvironmentBroken("The environment raised KeyError: 'x'")
    handle = ScriptedHandle([[(2, outcome("c"))], [(0, outcome("a")), (1, broken)]])
    assert step_all(handle, "a", "b", "c") == [outcome("a"), broken, outcome("c")]
    assert handle.requests == [[request("a"), request("b"), request("c")]]


def test_a_call_that_breaks_midway_fails_only_those_without_an_answer() -> None:
    handle = ScriptedHandle([[(1, outcome("b"))], ActorDiedError()])
    lost, answered = step_all(handle, "a", "b")
    assert answered == outcome("b")
    assert isinstance(lost, EnvironmentLost)
    assert str(lost) == "The replica of environment 'task' died during the call."


def test_a_call_that_ends_early_or_cannot_be_made_is_a_lost_environment() -> None:
    [early] = step_all(ScriptedHandle([]), "a")
    assert isinstance(early, EnvironmentLost)
    [refused] = step_all(ScriptedHandle(RayServeException("no replicas")), "a")
    assert isinstance(refused, EnvironmentLost)


def test_a_call_that_nobody_waits_for_any_more_is_cancelled() -> None:
    handle = ScriptedHandle([[(0, outcome())], [(1, outcome())]])

    async def hang_up() -> None:
        environment = hop(handle)
        steps = [asyncio.create_task(environment.step(request(name))) for name in "ab"]
        await asyncio.sleep(0.005)
        for step in steps:
            step.cancel()
        await asyncio.gather(*steps, return_exceptions=True)
        await asyncio.sleep(0.005)

    asyncio.run(hang_up())
    assert handle.calls[0].cancelled


class ScriptedGenerators:
    """A Serve handle of generators that answer each generation by `failure`, or else never."""

    def __init__(self, failure: Exception | None = None) -> None:
        self._failure = failure
        self.asked_of: list[str] = []
        self.generated: list[list[str]] = []
        self.aborted: list[list[str]] = []
        self.calls: list[ScriptedCall] = []
        self.deployment_id = "Generator"
        self.generate = SimpleNamespace(remote=self._generate)
        self.abort = SimpleNamespace(remote=self._abort)

    def options(self, session_id: str = "", **_: Any) -> "ScriptedGenerators":
        if session_id:
            self.asked_of.append(session_id)
        return self

    def _generate(self, requests: list[GenerationRequest]) -> ScriptedCall:
        self.generated.append([request.request_id for request in requests])
        self.calls.append(ScriptedCall([[(place, self._failure) for place in range(len(requests))]]))
        self.calls[-1].answers_nothing = self._failure is None
        return self.calls[-1]

    def _abort(self, request_ids: list[str]) -> Any:
        self.aborted.append(request_ids)
        return asyncio.ensure_future(asyncio.sleep(0))


def generation_request(name: str) -> GenerationRequest:
    return GenerationRequest(name, [1], 1, (), SamplingOptions(), rollout_id=name)


def cancelled_generations(names: str, cancelled: str) -> ScriptedGenerators:
    handle = ScriptedGenerators()

    async def hang_up() -> None:
        unchecked: Any = handle
        generator = RemoteGenerator(unchecked)
        running = {name: asyncio.create_task(generator.generate(generation_request(name))) for name in names}
        await asyncio.sleep(0.005)
        for name in cancelled:
            running[name].cancel()
        await asyncio.sleep(0.005)
        for task in running.values():
            task.cancel()
        await asyncio.gather(*running.values(), return_exceptions=True)

    asyncio.run(hang_up())
    return handle


def test_generations_of_a_call_that_nobody_waits_for_are_aborted_while_the_others_go_on() -> None:
    handle = cancelled_generations("abc", cancelled="ac")
    assert handle.generated == [["a", "b", "c"]]
    assert handle.aborted == [["a", "c"]]


def test_a_call_of_which_nothing_is_waited_for_is_cancelled_whole() -> None:
    handle = cancelled_generations("a", cancelled="a")
    assert handle.aborted == []
    assert handle.calls[0].cancelled


def test_a_call_ends_when_only_what_was_given_up_is_left_of_it() -> None:
    handle = ScriptedHandle([[(1, outcome())], [(0, outcome())]])

    async def hang_up_on_the_first() -> None:
        environment = hop(handle)
        hanging, answered = (asyncio.create_task(environment.step(request(name))) for name in "ab")
        await asyncio.sleep(0.005)
        hanging.cancel()
        await answered
        await asyncio.sleep(0.005)

    asyncio.run(hang_up_on_the_first())
    assert handle.calls[0].cancelled


def test_a_call_whose_answer_cannot_be_read_is_ended() -> None:
    handle = ScriptedHandle([KeyError("no such class")])
    [broken] = step_all(handle, "a")
    assert isinstance(broken, KeyError)
    assert handle.calls[0].cancelled


def test_an_answer_that_grpc_could_not_carry_is_a_lost_environment() -> None:
    [lost] = step_all(ScriptedHandle([RpcError("RESOURCE_EXHAUSTED")]), "a")
    assert isinstance(lost, EnvironmentLost)


@pytest.mark.parametrize("failure", [GenerationLost("died"), Overloaded("full"), None])
def test_the_next_try_of_a_turn_goes_to_another_replica(failure: Exception | None) -> None:
    handle = ScriptedGenerators(failure)
    note_replicas(handle.deployment_id, ["a", "b"])

    async def try_twice() -> list[str]:
        unchecked: Any = handle
        generator = RemoteGenerator(unchecked)
        for _ in range(2):
            trying = asyncio.create_task(generator.generate(generation_request("one")))
            await asyncio.wait([trying], timeout=0.1)
            # Without a failure it takes too long.
            trying.cancel()
            await asyncio.gather(trying, return_exceptions=True)
        return handle.asked_of

    try:
        first, second = asyncio.run(try_twice())
    finally:
        note_replicas(handle.deployment_id, [])
    assert {first, second} == {"a", "b"}


def test_what_is_given_up_before_it_was_sent_is_never_sent() -> None:
    handle = ScriptedHandle()

    async def hang_up_at_once() -> None:
        step = asyncio.create_task(hop(handle).step(request("a")))
        await asyncio.sleep(0)
        step.cancel()
        await asyncio.gather(step, return_exceptions=True)
        await asyncio.sleep(0.005)

    asyncio.run(hang_up_at_once())
    assert handle.requests == []


@pytest.mark.parametrize("samples", [1, 7])
def test_in_lockstep_an_environment_gets_one_call_a_turn(samples: int) -> None:
    handle = ScriptedHandle()
    episodes = [EpisodeRecipe(position=place, max_rollout_turns=3).make() for place in range(samples)]
    collect(episodes, RolloutContext(ScriptedGenerator(["A"]), {"task": hop(handle)}, LockstepSchedule()))
    assert [len(requests) for requests in handle.requests] == [samples] * 3
