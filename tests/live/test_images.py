"""Images in the prompts of a real engine: a random Idefics3, against transformers with the same pixels."""

import asyncio
import random
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from deployments.chat.chat_tokenizer import TransformersChatTokenizer
from deployments.failures import GenerationRejected
from deployments.generation import engine_images
from deployments.generation.engine import VLLMEngine
from deployments.policy.commands import SwapOptions
from deployments.protocols.chat import ChatOptions
from deployments.protocols.generation import GenerationRequest, SamplingOptions
from deployments.protocols.images import ImageSpan, ImageStore, ImageTokens
from rollout_client.contract.messages import PromptMessage
from rollout_client.contract.rollouts import SampleResult
from rollout_client.tensors import PaddingSide, image_inputs, images_shown, to_tensors
from rollout_env import StepOutcome
from service.rollouts.loop import RolloutContext, _play_sample
from service.rollouts.messages import ImageReader
from service.rollouts.pacing import Schedule
from tests.fakes.image_store import ImagesInProcess
from tests.live.engines import RunningEngine, float32_settings, running_engine
from tests.live.prefix_cache import found_in_prefix_cache
from tests.live.test_engine import EngineGenerator
from tests.service.scripted import EpisodeRecipe, ScriptedEnvironment
from tests.vision_model import TOKENS_OF_TILE, SeenByTransformers, picture, save_vision_model

pytestmark = pytest.mark.long
SIZES = ((64, 64), (100, 40), (30, 50), (300, 200))
NEAR = 2e-3
"""The two add up attention in different orders, in float32."""


class SeeingGenerator(EngineGenerator):
    """An engine in this process that takes images."""

    async def image_tokens(self, names: Any) -> list[ImageTokens]:
        return await self._engine.image_tokens(names)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_vision_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def images() -> ImagesInProcess:
    return ImagesInProcess()


@pytest.fixture(scope="module")
def engine(folder: Path, images: ImagesInProcess) -> Iterator[RunningEngine]:
    with seeing_engine(folder, images) as started:
        yield started


def seeing_engine(folder: Path, images: ImageStore) -> AbstractContextManager[RunningEngine]:
    settings = float32_settings(folder, 1500, enable_chunked_prefill=False, max_num_batched_tokens=1500)
    return running_engine(settings, images)


async def play(
    engine: VLLMEngine,
    images: ImagesInProcess,
    folder: Path,
    draw: random.Random,
    cuts_s: list[float],
    temperature: float = 1.0,
) -> SampleResult:
    """A conversation of random turns, pictures and texts."""
    tokenizer = TransformersChatTokenizer.load(str(folder))
    kept = await images.put([picture(*draw.choice(SIZES), seed=draw.randrange(5)) for _ in range(4)])
    parts: list[dict[str, str]] = [{"type": "text", "text": f"Look {draw.randrange(100)}: "}]
    for name in draw.choices(kept, k=draw.randrange(3)):
        parts += [{"type": "image", "image": name}, {"type": "text", "text": draw.choice(["", " and ", "\n"])}]
    generator = SeeingGenerator(engine, cuts_s)
    reader = ImageReader(generator)
    known: dict[str, ImageTokens] = {}
    await reader.learn(kept, known)
    prompt = [PromptMessage.model_validate({"role": "user", "content": parts})]
    log = tokenizer.prompt(prompt, ChatOptions(images=known), 1500)
    outcomes = [
        StepOutcome({"role": "user", "content": f"Next {turn}", "images": draw.choices(kept, k=shown)}, 1.0, False)
        if (shown := draw.randrange(3))
        else StepOutcome({"role": "user", "content": f"Go on {turn}"}, 0.5, False)
        for turn in range(6)
    ]
    recipe = EpisodeRecipe(
        message_log=lambda _: log,
        max_seq_len=1500,
        max_new_tokens=draw.randint(1, 12),
        max_rollout_turns=draw.randint(1, 6),
        observation_format="chat",
        retries=20,
        tokenizer=tokenizer,
        sampling=SamplingOptions(temperature=temperature, ignore_eos=True, seed=draw.randrange(1000)),
    )
    context = RolloutContext(generator, {"task": ScriptedEnvironment(outcomes)}, Schedule(), images=reader)
    return (await _play_sample(recipe.make(), context)).result()


BLOCK = 128
"""Tokens of a block of vLLM's cache on processors."""
CUTS_S = [0.02, 0.01, 0.03, 0.02]


def assert_logprobs_of_transformers(engine: RunningEngine, images: ImagesInProcess, folder: Path, seed: int) -> None:
    running, loop = engine
    seen = SeenByTransformers(folder)
    for cuts_s in ([], CUTS_S):
        result = loop.run(play(running, images, folder, random.Random(seed), cuts_s))
        assert result.error is None
        assert seen.differences(result, images.kept).abs().max() < NEAR


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.long) for seed in (0, *range(2, 12)))])
def test_conversations_with_pictures_have_the_logprobs_of_transformers(
    engine: RunningEngine, images: ImagesInProcess, folder: Path, seed: int
) -> None:
    assert_logprobs_of_transformers(engine, images, folder, seed)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 4))])
def test_an_interrupted_conversation_with_pictures_goes_on_unchanged(
    engine: RunningEngine, images: ImagesInProcess, folder: Path, seed: int
) -> None:
    running, loop = engine
    whole, cut = (
        loop.run(play(running, images, folder, random.Random(seed), cuts_s, temperature=0.0)) for cuts_s in ([], CUTS_S)
    )
    assert [message.token_ids for message in cut.message_log] == [message.token_ids for message in whole.message_log]
    assert [message.mm_ranges for message in cut.message_log] == [message.mm_ranges for message in whole.message_log]


def generated_ids(result: SampleResult) -> list[Sequence[int]]:
    return [message.token_ids for message in result.message_log if message.generation_logprobs]


def differences_of_batch(
    engine: RunningEngine, images: ImagesInProcess, folder: Path, padding_side: PaddingSide
) -> torch.Tensor:
    """Of each generated token: the log-probability that a trainer computes of a batch, less the recorded one."""
    running, loop = engine
    seen = SeenByTransformers(folder)
    played = [loop.run(play(running, images, folder, random.Random(seed), [])) for seed in range(20, 30)]
    # A random model samples the token of an image too, which transformers would take for one.
    results = [result for result in played if not any(seen.placeholder in ids for ids in generated_ids(result))]
    assert sum(bool(images_shown(result.message_log)) for result in results) >= 4
    tensors = to_tensors(results, pad_token_id=256, padding_side=padding_side)
    inputs = image_inputs(results, tensors, images.kept, seen.processor)
    with torch.inference_mode():
        logits = seen.model(input_ids=tensors.input_ids, attention_mask=tensors.attention_mask, **inputs).logits
    logprobs = logits[:, :-1].log_softmax(-1).gather(2, tensors.input_ids[:, 1:, None])[..., 0]
    differences: torch.Tensor = (logprobs - tensors.generation_logprobs[:, 1:]) * tensors.loss_mask[:, 1:]
    return differences


def test_a_picture_is_read_once_and_each_tile_has_its_tokens(engine: RunningEngine, images: ImagesInProcess) -> None:
    running, loop = engine
    names = loop.run(images.put([picture(64, 64, 77), picture(90, 40, 78), picture(64, 64, 77)]))
    images.read.clear()
    first, wide, again = loop.run(running.image_tokens(names))
    assert first == again
    assert images.read == names[:2]
    placeholders = [list(each.token_ids).count(each.placeholder) for each in (first, wide)]
    assert placeholders == [5 * TOKENS_OF_TILE, 3 * TOKENS_OF_TILE]


def test_a_picture_that_prompts_go_on_showing_counts_as_used_in_the_store(
    engine: RunningEngine, images: ImagesInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    running, loop = engine
    names = loop.run(images.put([picture(64, 64, 81)]))
    images.read.clear()

    async def shown(times: int) -> None:
        for _ in range(times):
            await running.image_tokens(names)
            await asyncio.sleep(0.01)

    loop.run(shown(3))
    assert images.read == names
    monkeypatch.setattr(engine_images, "_USED_EVERY_S", 0.0)
    loop.run(shown(2))
    assert images.read == names * 3


def test_what_is_no_picture_is_refused(engine: RunningEngine, images: ImagesInProcess) -> None:
    running, loop = engine
    names = loop.run(images.put([b"no picture", picture(64, 64, 80)[:300]]))
    for name in names:
        with pytest.raises(GenerationRejected, match=f"refuses image {name}"):
            loop.run(running.image_tokens([name]))


def test_other_tokens_in_the_place_of_an_image_are_refused(engine: RunningEngine, images: ImagesInProcess) -> None:
    running, loop = engine
    [name] = loop.run(images.put([picture(64, 64, 79)]))
    [tokens] = loop.run(running.image_tokens([name]))
    options = SamplingOptions(temperature=0.0, ignore_eos=True)
    ids = [72, 105, *tokens.token_ids, 33]

    def request(shift: int) -> GenerationRequest:
        span = ImageSpan(name, 2 + shift, 2 + shift + len(tokens.token_ids))
        return GenerationRequest(f"shifted-{shift}", ids, 2, (), options, images=(span,))

    with pytest.raises(GenerationRejected, match=f"are not those that the model has for image {name}: send tokens"):
        loop.run(running.generate(request(1)))
    assert len(loop.run(running.generate(request(0))).token_ids) == 2


def test_a_later_turn_finds_what_was_computed_of_the_pictures(engine: RunningEngine, images: ImagesInProcess) -> None:
    running, loop = engine
    names = loop.run(images.put([picture(64, 64, seed) for seed in (90, 91, 92)]))
    ids: list[int] = [72]
    spans: list[ImageSpan] = []
    for name, tokens in zip(names, loop.run(running.image_tokens(names)), strict=True):
        spans.append(ImageSpan(name, len(ids), len(ids) + len(tokens.token_ids)))
        ids += tokens.token_ids
    options = SamplingOptions(temperature=0.0, ignore_eos=True)

    def found(request: GenerationRequest) -> tuple[int, list[int]]:
        before = found_in_prefix_cache()
        made = loop.run(running.generate(request))
        return found_in_prefix_cache() - before, [*made.token_ids]

    first, made = found(GenerationRequest("first", ids, 4, (), options, images=tuple(spans)))
    later = [*ids, *made, 33, 34]
    second, _ = found(GenerationRequest("later", later, 4, (), options, images=tuple(spans)))
    # The same tokens with another picture in the place of the last are another prompt.
    [other] = loop.run(images.put([picture(64, 64, 93)]))
    changed = (*spans[:2], ImageSpan(other, spans[2].start, spans[2].end))
    third, _ = found(GenerationRequest("other", later, 4, (), options, images=changed))
    assert (first, second) == (0, len(ids) // BLOCK * BLOCK)
    assert third == spans[2].start // BLOCK * BLOCK


def test_pushed_weights_of_language_and_vision_see_the_pictures(
    engine: RunningEngine, images: ImagesInProcess, folder: Path, tmp_path: Path
) -> None:
    running, loop = engine
    original = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    pushed = {
        name: tensor * (1 + 0.3 * torch.randn(tensor.shape, generator=generator)) for name, tensor in original.items()
    }
    vision_alone = original | {name: tensor for name, tensor in pushed.items() if "vision_model" in name}
    seen = SeenByTransformers(folder)
    for version, state in enumerate((pushed, vision_alone, original), 1):
        file = tmp_path / f"{version}.safetensors"
        save_file(state, file)
        loop.run(running.weights.stage(version, file))
        loop.run(running.weights.swap(SwapOptions()))
        result = loop.run(play(running, images, folder, random.Random(3), []))
        assert {span.version for each in result.message_log for span in each.weight_versions or ()} == {str(version)}
        differences = []
        for weights in (state, original):
            seen.model.load_state_dict(weights)
            differences.append(seen.differences(result, images.kept).abs().mean().item())
        by_pushed, by_original = differences
        assert by_pushed < NEAR
        assert by_original < NEAR if state is original else by_original > 20 * NEAR


def test_weights_pushed_beside_a_kept_prefix_cache_see_known_pictures(
    engine: RunningEngine, images: ImagesInProcess, folder: Path, tmp_path: Path
) -> None:
    running, loop = engine
    original = load_file(folder / "model.safetensors")
    [name] = loop.run(images.put([picture(64, 64, 94)]))
    [tokens] = loop.run(running.image_tokens([name]))

    def request(first: int) -> GenerationRequest:
        span = ImageSpan(name, 1, 1 + len(tokens.token_ids))
        options = SamplingOptions(temperature=0.0, ignore_eos=True)
        return GenerationRequest(f"kept-{first}", [first, *tokens.token_ids], 4, (), options, images=(span,))

    def seen(first: int) -> list[float]:
        return [*loop.run(running.generate(request(first))).logprobs]

    before = seen(72)
    doubled = {name: tensor * (2 if "vision_model" in name else 1) for name, tensor in original.items()}
    found = []
    for version, state in enumerate((doubled, original), 11):
        file = tmp_path / f"{version}.safetensors"
        save_file(state, file)
        loop.run(running.canary.try_current())
        loop.run(running.weights.stage(version, file))
        loop.run(running.weights.swap(SwapOptions(reset_prefix_cache=False)))
        loop.run(running.canary.try_current())
        found.append(seen(72))
    assert found[0] != pytest.approx(before, abs=1e-4)
    assert found[1] == pytest.approx(before, abs=1e-4)
