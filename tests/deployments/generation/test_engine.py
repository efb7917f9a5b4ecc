"""What the engine's outputs become. Generating itself needs an engine: `tests/live/test_engine.py`."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput

from deployments.failures import GenerationLost, GenerationNotFinite, OtherVersionLoaded, RolloutFailure
from deployments.generation.engine import VLLMEngine
from deployments.generation.engine_images import EngineImages, ImagesUnsupported
from deployments.generation.engine_requests import generation_of
from deployments.policy.commands import LoadedWeights
from deployments.protocols.generation import Generation, GenerationRequest, SamplingOptions
from deployments.protocols.images import ImageSpan
from deployments.upstream.vllm.engine_progress import StepCounter
from tests.fakes.async_llm import GeneratingLLM
from tests.fakes.image_store import ImagesInProcess

# Importing vLLM takes seconds.
pytestmark = pytest.mark.slow


def completion(*logprobs: float, tokens: int | None = None) -> CompletionOutput:
    count = len(logprobs) if tokens is None else tokens
    flat = FlatLogprobs()
    flat.logprobs = list(logprobs)
    return CompletionOutput(0, "", list(range(count)), None, flat, finish_reason="stop")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_log_probability_that_is_not_finite_fails_the_generation(value: float) -> None:
    with pytest.raises(GenerationNotFinite) as raised:
        generation_of(completion(-0.5, value, math.nan), None)
    assert str(raised.value) == f"The engine gave {value} as the log-probability of token 1 of 3."


def test_missing_log_probabilities_fail_the_generation() -> None:
    with pytest.raises(GenerationLost, match=r"^The engine gave 1 log-probabilities for 2 tokens\.$"):
        generation_of(completion(-0.5, tokens=2), None)


class SlowImages:
    """Reads the images of a prompt until it is told to end."""

    def __init__(self) -> None:
        self.asked, self.may_end = asyncio.Event(), asyncio.Event()

    async def prompt(self, token_ids: Sequence[int], *_: Any) -> dict[str, Any]:
        self.asked.set()
        await self.may_end.wait()
        return {"prompt_token_ids": [*token_ids]}


SHOWS = GenerationRequest("a", [1, 2], 1, (), SamplingOptions(), images=(ImageSpan("sha256:0", 0, 1),))


def generated_while(
    change: Callable[[VLLMEngine], Awaitable[None]], request: GenerationRequest = SHOWS
) -> tuple[list[list[int]], Generation | RolloutFailure]:
    """What reaches the engine, and what becomes of a generation, where this happens while its images are read."""
    llm: Any = GeneratingLLM(["x."])

    async def generate() -> Generation | RolloutFailure:
        engine = VLLMEngine(llm, StepCounter())
        images: Any = SlowImages()
        engine.images = images
        generating = asyncio.create_task(engine.generate(request))
        try:
            async with asyncio.timeout(60):
                await images.asked.wait()
                await change(engine)
                images.may_end.set()
                return await generating
        except RolloutFailure as failure:
            return failure

    return llm.prompts, asyncio.run(generate())


def test_a_generation_interrupted_during_its_images_reaches_no_engine() -> None:
    lost = GenerationLost("The replica ends.")
    prompts, generation = generated_while(lambda engine: engine.interrupt(["a"], lost))
    assert prompts == []
    assert isinstance(generation, Generation)
    assert (generation.finish_reason, generation.failure, len(generation.token_ids)) == ("abort", lost, 0)


def test_a_version_replaced_while_images_are_read_does_not_generate() -> None:
    async def update(engine: VLLMEngine) -> None:
        engine.weights.loaded = LoadedWeights(1)

    prompts, failure = generated_while(update, replace(SHOWS, weight_version=0))
    assert (prompts, type(failure)) == ([], OtherVersionLoaded)


BOTH_WAYS = r"attend to those behind them in m, which vLLM's build for processors leaves out: .* on a GPU, or"


@pytest.mark.parametrize(
    ("sees", "both_ways", "refusal"),
    [(False, False, r"^m sees no images: leave images out of the config\.$"), (True, True, BOTH_WAYS)],
)
def test_a_model_that_cannot_be_served_with_images_here_is_refused(sees: bool, both_ways: bool, refusal: str) -> None:
    config = SimpleNamespace(model="m", is_multimodal_model=sees, is_mm_prefix_lm=both_ways)
    llm: Any = SimpleNamespace(model_config=config)
    with pytest.raises(ImagesUnsupported, match=refusal):
        EngineImages(llm, ImagesInProcess())
