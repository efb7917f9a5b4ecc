"""The engine's outputs for calls of model servers' APIs, over a scripted vLLM: updates, interruptions, and failures."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError

from deployments.failures import (
    GenerationLost,
    OtherVersionLoaded,
    ReplicaShuttingDown,
    RolloutFailure,
    TokensTooOld,
    VersionReplaced,
)
from deployments.generation.engine import VLLMEngine
from deployments.generation.engine_outputs import RunningGenerations
from deployments.policy.commands import LoadedWeights
from deployments.protocols.generation import GenerationRequest, SamplingOptions
from deployments.upstream.vllm.engine_progress import StepCounter
from tests.fakes.async_llm import GeneratingLLM, Step

# Importing vLLM takes seconds.
pytestmark = [pytest.mark.slow, pytest.mark.true_clock]
REQUEST = GenerationRequest("call", [1, 2], 10, (), SamplingOptions())


class World:
    def __init__(self, *scripts: Sequence[Step]) -> None:
        self.llm = GeneratingLLM(*scripts)
        unchecked: Any = self.llm
        self.engine = VLLMEngine(unchecked, StepCounter())

    def update(self) -> None:
        """An update of the weights that aborts what runs."""
        self.engine.weights.aborts += 1
        self.engine.weights.loaded = LoadedWeights(self.engine.weights.loaded.version + 1)

    async def interrupt(self, failure: RolloutFailure | None = None) -> None:
        await self.engine.interrupt([REQUEST.generation_id], failure)

    async def hand_over(self) -> None:
        await self.interrupt(ReplicaShuttingDown("it ends"))

    def swap(self) -> None:
        """An update of the weights that freezes what runs, which goes on with the new ones."""
        self.engine.weights.swaps += 1
        self.engine.weights.loaded = LoadedWeights(self.engine.weights.loaded.version + 1)
        self.llm.version = str(self.engine.weights.loaded.version)

    async def outputs(self, request: GenerationRequest = REQUEST, **given: Any) -> list[RequestOutput]:
        params = SamplingParams(max_tokens=10, **{"output_kind": RequestOutputKind.DELTA, **given})
        prompt = {"prompt_token_ids": [1, 2]}
        return [output async for output in self.engine.completions.stream(request, prompt, params)]


def text_of(outputs: Sequence[RequestOutput]) -> str:
    return "".join(output.outputs[0].text for output in outputs)


async def test_an_update_does_not_end_a_call() -> None:
    world = World()
    world.llm.scripts = [[world.update, "!"], ["ab", world.update, "!"], ["c", world.update, "!"], ["d."]]
    outputs = await world.outputs()
    assert [output.outputs[0].text for output in outputs] == ["ab", "c", "d"], "nothing is said of an update"
    assert [output.outputs[0].finish_reason for output in outputs if output.finished] == ["stop"]
    assert world.llm.prompts == [[1, 2], [1, 2], [1, 2, 97, 98], [1, 2, 97, 98, 99]]


async def test_an_interruption_ends_a_call_with_what_it_has() -> None:
    world = World()
    world.llm.scripts = [["ab", world.update, world.interrupt, "!"]]
    outputs = await world.outputs()
    assert (text_of(outputs), outputs[-1].outputs[0].finish_reason) == ("ab", "abort")


FINAL = RequestOutputKind.FINAL_ONLY
UPDATES = [["ab", World.update, "!"], ["c", World.update, "!"], ["d."]]


@pytest.mark.parametrize(
    ("scripts", "demanded", "sampling", "failure"),
    [
        ([["ab", World.hand_over, "!"]], {}, {}, ReplicaShuttingDown),
        ([["ab", "!"]], {}, {}, GenerationLost),
        ([["ab", EngineDeadError()]], {}, {}, GenerationLost),
        ([["ab", World.swap, "c."]], {"weight_version": 0}, {}, VersionReplaced),
        (UPDATES, {"max_staleness": 1}, {}, TokensTooOld),
        ([[World.swap, "ab."]], {}, {"prompt_logprobs": 1}, GenerationLost),
        ([[World.swap, "ab."]], {}, {"prompt_logprobs": 1, "output_kind": FINAL}, GenerationLost),
    ],
)
async def test_a_call_that_cannot_be_answered_fails_so_that_it_can_be_made_again(
    scripts: list[list[Any]], demanded: dict[str, Any], sampling: dict[str, Any], failure: type[RolloutFailure]
) -> None:
    world = World()
    world.llm.scripts = [[partial(step, world) if callable(step) else step for step in each] for each in scripts]
    with pytest.raises(failure):
        await world.outputs(replace(REQUEST, **demanded), **sampling)
    assert len(world.llm.prompts) == min(2, len(scripts))


async def test_versions_are_looked_at_again_right_before_the_engine() -> None:
    world = World()
    world.engine.weights.may_generate.clear()
    call = asyncio.create_task(world.outputs(replace(REQUEST, weight_version=0)))
    await asyncio.sleep(0)
    world.update()
    world.engine.weights.may_generate.set()
    with pytest.raises(OtherVersionLoaded):
        await call
    assert world.llm.prompts == []


async def test_a_prompt_that_was_scored_before_the_change_is_not_scored_again() -> None:
    world = World()
    world.llm.scripts = [["a", world.swap, "b."]]
    assert text_of(await world.outputs(prompt_logprobs=1)) == "ab"

    def label_of_the_first_token() -> None:
        world.swap()
        world.llm.version = "0"

    world = World()
    world.llm.scripts = [[label_of_the_first_token, "ab."]]
    assert text_of(await world.outputs(output_kind=RequestOutputKind.FINAL_ONLY, prompt_logprobs=1)) == "ab"
    assert world.llm.prompts == [[1, 2]]


def named(name: str) -> GenerationRequest:
    return replace(REQUEST, generation_id=name)


async def test_generations_are_interrupted_by_their_ids_while_they_run() -> None:
    llm: Any = GeneratingLLM()
    generations = RunningGenerations(llm)
    failure = ReplicaShuttingDown("it ends")
    with generations.running(named("a")) as first, generations.running(named("b")) as other:
        with generations.running(named("a")) as retry:
            assert len({first.engine_id, retry.engine_id, other.engine_id}) == len(generations) == 3
            await generations.interrupt(["a", "unknown"], failure)
        assert [one.interrupted.is_set() for one in (first, retry, other)] == [True, True, False]
        assert (first.failure, other.failure) == (failure, None)
        await generations.interrupt(["a", "b"])
    await generations.interrupt(["a", "b"])
    assert llm.ended == [sorted([first.engine_id, retry.engine_id]), sorted([first.engine_id, other.engine_id])]
    assert len(generations) == 0
