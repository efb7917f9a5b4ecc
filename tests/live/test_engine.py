"""A real engine without the service around it: what cannot be brought about in the running service.

One engine for all tests; the last of them leaves it dead.
"""

import asyncio
import random
from collections.abc import Coroutine, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from safetensors.torch import load_file, save_file

from deployments.chat.chat_tokenizer import TransformersChatTokenizer
from deployments.generation.engine import VLLMEngine
from deployments.generation.settings import EngineSettings
from deployments.generation.weight_updater import WeightsFailed
from deployments.policy.commands import SwapOptions
from deployments.protocols.chat import ChatOptions
from deployments.protocols.generation import Generation, GenerationRequest, Generator, SamplingOptions
from deployments.protocols.replicas import GeneratorDescription
from rollout_client.contract.messages import PromptMessage
from rollout_client.contract.rollouts import SampleResult
from service.rollouts.loop import _play_sample
from tests.deployments.generation.serving.vllm_layers import ServedEngine
from tests.live.engines import running_engine, tiny_settings
from tests.paths import TINY_MODEL
from tests.service.rollouts.playing import async_context
from tests.service.scripted import EpisodeRecipe, ScriptedEnvironment, outcome

Result = TypeVar("Result")
LONG = SamplingOptions(ignore_eos=True)
END, END_ID = "<|end|>", 261
pytestmark = pytest.mark.long


class EngineGenerator(Generator):
    """Generates on one engine in this process; each generation is interrupted after the next of `cuts_s` seconds."""

    def __init__(self, engine: VLLMEngine, cuts_s: Iterable[float] = ()) -> None:
        self._engine = engine
        self._cuts_s = iter(cuts_s)
        self.parts = 0

    async def generate(self, request: GenerationRequest) -> Generation:
        self.parts += 1
        cut_s = next(self._cuts_s, None)
        timer = cut_s and asyncio.get_running_loop().call_later(cut_s, self._cut, request.generation_id)
        try:
            return await self._engine.generate(request)
        finally:
            if timer:
                timer.cancel()

    def _cut(self, generation_id: str) -> None:
        self._cutting = asyncio.create_task(self._engine.interrupt([generation_id]))

    def is_generating(self, rollout_id: str) -> bool:
        raise NotImplementedError

    def interrupt(self, rollout_id: str) -> bool:
        raise NotImplementedError

    def release(self, rollout_id: str) -> None:
        raise NotImplementedError

    async def describe(self) -> GeneratorDescription:
        return self._engine.describe()


@dataclass
class Running:
    """The engine, and the event loop that it was started in."""

    engine: VLLMEngine
    loop: asyncio.Runner
    model: Path

    def run(self, steps: Coroutine[Any, Any, Result]) -> Result:
        return self.loop.run(steps)


@pytest.fixture(scope="module")
def settings() -> EngineSettings:
    return tiny_settings()


@pytest.fixture(scope="module")
def running(settings: EngineSettings) -> Iterator[Running]:
    with running_engine(settings) as (engine, loop):
        yield Running(engine, loop, Path(settings.model))


def recipe(prompt: str, *stop_strings: str, max_new_tokens: int = 150) -> EpisodeRecipe:
    tokenizer = TransformersChatTokenizer.load(str(TINY_MODEL))
    ids = tokenizer.prompt([PromptMessage(role="user", content=prompt)], ChatOptions(), 1000)
    return EpisodeRecipe(
        message_log=lambda _: ids,
        stop_strings=stop_strings,
        max_new_tokens=max_new_tokens,
        max_rollout_turns=2,
        observation_format="chat",
        retries=1,
        tokenizer=tokenizer,
        sampling=SamplingOptions(temperature=0.0, ignore_eos=True),
    )


async def played(recipe: EpisodeRecipe, generator: Generator) -> SampleResult:
    environment = ScriptedEnvironment([outcome("And 3 + 4?", 1.0)])
    return (await _play_sample(recipe.make(), async_context(generator, environment))).result()


RECIPES = [
    recipe("What is 3 + 4?"),
    recipe("What is 12 + 30?", "}"),
    recipe("Say something.", "boxed{7", "42"),
    recipe("What is 5 + 5?", "never", max_new_tokens=99),
]


def test_interrupted_greedy_generations_go_on_unchanged(running: Running) -> None:
    draw = random.Random(0)

    async def play() -> list[tuple[SampleResult, SampleResult, int]]:
        results = []
        for each in RECIPES:
            whole = await played(each, EngineGenerator(running.engine))
            for _ in range(3):
                cut = EngineGenerator(running.engine, [draw.uniform(0.001, 0.08) for _ in range(12)])
                results.append((whole, await played(each, cut), cut.parts))
        return results

    results = running.run(play())
    assert sum(parts for *_, parts in results) > 5 * len(results), "generations were interrupted"
    for whole, cut, _ in results:
        assert (cut.status, cut.metrics) == (whole.status, whole.metrics)
        for expected, message in zip(whole.message_log, cut.message_log, strict=True):
            assert list(message.token_ids) == list(expected.token_ids)
            assert (message.content, message.finish_reason) == (expected.content, expected.finish_reason)
            assert message.weight_versions == expected.weight_versions
            assert message.generation_logprobs == pytest.approx(expected.generation_logprobs, abs=0.05)


def test_a_generation_cut_by_new_weights_goes_on_in_the_same_message(running: Running) -> None:
    engine = running.engine
    before = engine.weights.loaded.version

    async def play() -> SampleResult:
        await engine.weights.stage(before + 1, running.model / "model.safetensors")
        playing = asyncio.create_task(played(recipe("Hi", max_new_tokens=400), EngineGenerator(engine)))
        async with asyncio.timeout(60):
            while engine.load().kv_tokens < 100:
                await asyncio.sleep(0.01)
        await engine.weights.swap(SwapOptions(mode="abort"))
        return await playing

    result = running.run(play())
    assert (result.status, result.metrics.turn_gen_tokens) == ("max_turns", [400, 400])
    spans = result.message_log[1].weight_versions or []
    assert [(span.version, span.start, span.end) for span in spans] == [
        (str(before), 0, spans[0].end),
        (str(before + 1), spans[0].end, 400),
    ]
    assert 0 < spans[0].end < 400


def test_the_text_of_a_special_token_ends_a_rollout_and_a_call(running: Running) -> None:
    """The model ends its turn with it, and is told to go on there."""
    [message] = recipe("What is 3 + 4?").message_log("")
    prompt = list(message.token_ids or ())
    greedy = SamplingOptions(temperature=0.0, ignore_eos=True)
    generation = running.run(running.engine.generate(GenerationRequest("ends", prompt, 99, (END,), greedy)))
    ids = list(generation.token_ids)
    assert (generation.finish_reason, ids.index(END_ID)) == ("stop", len(ids) - 1)
    sampling = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 99, "stop": END}
    body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}

    async def called() -> list[dict[str, Any]]:
        return await ServedEngine(running.engine).events("generate", body)

    events = running.run(called())
    answers = [event for event in events if event["meta_info"]["finish_reason"]]
    assert [answer["output_ids"] for answer in answers] == [ids]
    assert {answer["meta_info"]["finish_reason"]["matched"] for answer in answers} == {END}
    assert [event for event in events if "input_token_logprobs" in event["meta_info"]] == answers
    scored = [token_id for _, token_id, _ in answers[0]["meta_info"]["input_token_logprobs"]]
    assert scored == prompt
    logprobs = [logprob for logprob, _, _ in answers[0]["meta_info"]["output_token_logprobs"]]
    assert logprobs == pytest.approx(list(generation.logprobs), abs=0.02)


def test_an_unknown_weight_transfer_backend_is_refused_with_those_known(settings: EngineSettings) -> None:
    arguments = settings.engine_args() | {"weight_transfer_config": {"backend": "ncl"}}
    with pytest.raises(ValueError, match=r"backend: 'ncl' does not exist; vLLM has .*\bipc\b.*\bnccl\b"):
        asyncio.run(VLLMEngine.start(arguments))


def test_after_a_swap_that_failed_halfway_the_engine_generates_no_token(running: Running, tmp_path: Path) -> None:
    """The last test: the engine cannot be used afterwards."""
    engine = running.engine
    before = engine.weights.loaded.version
    tensors, broken = load_file(running.model / "model.safetensors"), tmp_path / "model.safetensors"
    save_file(tensors | {max(tensors): torch.zeros(3)}, broken)

    async def play() -> list[Generation]:
        await engine.weights.stage(before + 1, broken)
        generations = [
            asyncio.create_task(engine.generate(GenerationRequest(f"{number}", [5, 6], 2000, (), LONG)))
            for number in range(4)
        ]
        async with asyncio.timeout(60):
            while engine.load().kv_tokens < 20:
                await asyncio.sleep(0.01)
        with pytest.raises(WeightsFailed, match="Attempted to load weight"):
            await engine.weights.swap(SwapOptions())
        assert (engine.weights.loaded.version, engine.weights.is_paused) == (before, True)
        # Tokens are counted ten times a second, and those of the last step may be on their way.
        await asyncio.sleep(0.5)
        there = engine.load().kv_tokens
        await asyncio.sleep(0.5)
        assert engine.load().kv_tokens == there
        await engine.interrupt([f"{number}" for number in range(4)])
        return await asyncio.gather(*generations)

    for end in running.run(play()):
        assert end.finish_reason == "abort"
        assert {span.version for span in end.weight_versions} <= {str(before)}
