"""Images in families of models whose processors need torchvision, against transformers with the same pixels."""

import asyncio
import random
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoProcessor
from vllm.config import ModelConfig
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.platforms import current_platform
from vllm.tokenizers import cached_tokenizer_from_config

from benchmarks.reference_model import load, perturbed
from deployments.chat.chat_tokenizer import TransformersChatTokenizer
from deployments.generation.engine_images import EngineImages
from deployments.policy.assembly import write_completed
from deployments.policy.commands import SwapOptions
from deployments.policy.weight_checks import layout_of, validate_full, validate_partial
from deployments.protocols.chat import ChatOptions
from rollout_client.contract.messages import PromptMessage
from rollout_client.contract.rollouts import SampleResult
from rollout_client.tensors import PaddingSide, image_inputs, images_shown, to_tensors
from rollout_client.tensors.images import TOKEN_TYPES
from rollout_client.weights.sources import full_weights
from tests.clients.scripted_service import result
from tests.fakes.image_store import ImagesInProcess
from tests.live.engines import RunningEngine
from tests.live.prefix_cache import found_in_prefix_cache
from tests.live.test_images import (
    BLOCK,
    NEAR,
    SIZES,
    assert_logprobs_of_transformers,
    differences_of_batch,
    play,
    seeing_engine,
)
from tests.vision_families import FAMILIES
from tests.vision_model import SeenByTransformers, picture

pytestmark = pytest.mark.long
pytest.importorskip("torchvision", reason="The processors need torchvision: python -m requirements.beside torchvision")


SERVED = [family for family in FAMILIES if family != "gemma3"]


@pytest.fixture(scope="module", params=SERVED)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return FAMILIES[request.param].save(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def images() -> ImagesInProcess:
    return ImagesInProcess()


@pytest.fixture(scope="module")
def engine(folder: Path, images: ImagesInProcess) -> Iterator[RunningEngine]:
    with seeing_engine(folder, images) as started:
        yield started


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_and_its_inputs_are_those_of_transformers_processor(
    family: str, images: ImagesInProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As on a GPU, which attends in all ways.
    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
    FAMILIES[family].save_processor(tmp_path)
    chat = TransformersChatTokenizer.load(str(tmp_path))
    processor: Any = AutoProcessor.from_pretrained(tmp_path)  # type: ignore[no-untyped-call]
    shown = [picture(*size, seed=50 + number) for number, size in enumerate(SIZES)]
    names = asyncio.run(images.put(shown))
    known = dict(zip(names, asyncio.run(EngineImages(processing_llm(tmp_path), images).tokens(names)), strict=True))
    parts = [part for name in names for part in ({"type": "text", "text": "See "}, {"type": "image", "image": name})]
    message = {"role": "user", "content": [*parts, {"type": "text", "text": "."}]}
    log = chat.prompt([PromptMessage.model_validate(message)], ChatOptions(images=known), 1500)
    text = processor.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
    # Pictures that are not listed by text are each taken alone.
    opened = [Image.open(BytesIO(data)).convert("RGB") for data in shown]
    expected = processor(text=[text], images=opened, return_tensors="pt")
    assert [token_id for message in log for token_id in message.token_ids] == expected["input_ids"][0].tolist()

    own = {"role": "assistant", "content": "", "token_ids": [7], "generation_logprobs": [-0.5], "finish_reason": "stop"}
    given = [message.model_dump(exclude_none=True) for message in log]
    rollouts = [SampleResult.model_validate(result(0, 0, message_log=[*given, own], total_reward=1.0))]
    inputs = image_inputs(rollouts, to_tensors(rollouts, pad_token_id=0), images.kept, processor)
    assert "pixel_values" in inputs
    for name, value in inputs.items():
        if name in TOKEN_TYPES:
            value = value[:, :-1]
        torch.testing.assert_close(value, expected[name])
    assert {*expected} - {"input_ids", "attention_mask"} <= {*inputs}


def processing_llm(folder: Path) -> Any:
    """An engine that has a processor and no model."""
    config = ModelConfig(str(folder), dtype="float32", max_model_len=1500)
    tokenizer = cached_tokenizer_from_config(config)
    processor = MULTIMODAL_REGISTRY.create_processor(config, tokenizer=tokenizer)
    renderer = SimpleNamespace(get_mm_processor=lambda: processor)
    return SimpleNamespace(model_config=config, renderer=renderer, get_tokenizer=lambda: tokenizer)


@pytest.mark.parametrize("seed", range(6))
def test_random_conversations_have_the_logprobs_of_transformers(
    engine: RunningEngine, images: ImagesInProcess, folder: Path, seed: int
) -> None:
    assert_logprobs_of_transformers(engine, images, folder, seed)


def test_a_conversation_that_is_played_again_is_found_in_the_prefix_cache(
    engine: RunningEngine, images: ImagesInProcess, folder: Path
) -> None:
    running, loop = engine
    found, results = [], []
    for _ in range(2):
        before = found_in_prefix_cache()
        results.append(loop.run(play(running, images, folder, random.Random(40), [], temperature=0.0)))
        found.append(found_in_prefix_cache() - before)
    first, again = results
    assert images_shown(first.message_log)
    assert [message.token_ids for message in again.message_log] == [message.token_ids for message in first.message_log]
    assert found[1] >= max(found[0], BLOCK)
    assert SeenByTransformers(folder).differences(again, images.kept).abs().max() < NEAR


@pytest.mark.parametrize("padding_side", ["left", "right"])
def test_a_trainer_recomputes_the_log_probabilities_of_a_batch(
    engine: RunningEngine, images: ImagesInProcess, folder: Path, padding_side: PaddingSide
) -> None:
    assert differences_of_batch(engine, images, folder, padding_side).abs().max() < NEAR


def test_pushed_modules_of_either_tower_or_of_both_generate(
    engine: RunningEngine, images: ImagesInProcess, folder: Path, tmp_path: Path
) -> None:
    running, loop = engine
    layout = layout_of(folder)
    seen = SeenByTransformers(folder)
    before = folder / "model.safetensors"
    for version, part in enumerate(("", "language_model", "vis"), 1):
        trained = [name for name, _ in seen.model.named_parameters() if part in name]
        assert trained
        state: dict[str, Any] = dict(seen.model.state_dict())
        load(seen.model, perturbed({name: state[name] for name in trained}, seed=version))
        for name, parameter in seen.model.named_parameters():
            parameter.requires_grad_(name in trained)
        pushed, full = tmp_path / f"pushed-{version}", tmp_path / f"{version}.safetensors"
        with pushed.open("wb") as file:
            file.writelines(full_weights(seen.model, layout, is_partial=bool(part)).blocks())
        validate_partial(pushed, layout)
        write_completed(before, pushed, full)
        validate_full(full, layout)
        loop.run(running.weights.stage(version, full))
        loop.run(running.weights.swap(SwapOptions()))
        result = loop.run(play(running, images, folder, random.Random(3), []))
        assert seen.differences(result, images.kept).abs().max() < NEAR
        assert SeenByTransformers(folder).differences(result, images.kept).abs().max() > NEAR
        before = full
