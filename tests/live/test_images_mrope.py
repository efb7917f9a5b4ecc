"""Images at positions of three dimensions: a random Qwen2.5-VL, against transformers with the same pixels."""

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from deployments.generation.engine import VLLMEngine
from deployments.policy.replicas.commands import SwapOptions
from rollout_client.tensors import image_inputs, images_shown, to_tensors
from tests.deployments.images.pictures import ImagesInProcess
from tests.live.test_images import NEAR, play, samples_placeholder, seeing_engine
from tests.vision_model import SeenByTransformers

pytestmark = pytest.mark.long
pytest.importorskip("torchvision", reason="The processor of Qwen2.5-VL needs torchvision: make test-torchvision")

from tests.mrope_model import save_mrope_model  # noqa: E402 - imports torchvision

CUTS_S = [0.02, 0.01, 0.03, 0.02]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_mrope_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def images() -> ImagesInProcess:
    return ImagesInProcess()


@pytest.fixture(scope="module")
def engine(folder: Path, images: ImagesInProcess) -> Iterator[tuple[VLLMEngine, asyncio.Runner]]:
    with seeing_engine(folder, images) as started:
        yield started


@pytest.mark.parametrize("seed", range(12))
def test_random_conversations_interrupted_or_not_have_the_log_probabilities_of_transformers(
    engine: tuple[VLLMEngine, asyncio.Runner], images: ImagesInProcess, folder: Path, seed: int
) -> None:
    running, loop = engine
    seen = SeenByTransformers(folder)
    for cuts_s in ([], CUTS_S):
        result = loop.run(play(running, images, folder, random.Random(seed), cuts_s))
        assert result.error is None
        assert seen.differences(result, images.kept).abs().max() < NEAR


@pytest.mark.parametrize("padding_side", ["left", "right"])
def test_a_trainer_recomputes_the_log_probabilities_of_a_batch(
    engine: tuple[VLLMEngine, asyncio.Runner], images: ImagesInProcess, folder: Path, padding_side: str
) -> None:
    running, loop = engine
    played = [loop.run(play(running, images, folder, random.Random(seed), [])) for seed in range(20, 30)]
    results = [result for result in played if not samples_placeholder(result, SeenByTransformers(folder).placeholder)]
    assert sum(bool(images_shown(result.message_log)) for result in results) >= 4
    tensors = to_tensors(results, pad_token_id=256, padding_side=padding_side)  # type: ignore[call-overload]
    seen = SeenByTransformers(folder)
    inputs = image_inputs(results, tensors, images.kept, seen.processor)
    with torch.inference_mode():
        logits = seen.model(input_ids=tensors.input_ids, attention_mask=tensors.attention_mask, **inputs).logits
    logprobs = logits[:, :-1].log_softmax(-1).gather(2, tensors.input_ids[:, 1:, None])[..., 0]
    far = (logprobs - tensors.generation_logprobs[:, 1:]) * tensors.loss_mask[:, 1:]
    assert far.abs().max() < NEAR


def test_pushed_weights_of_both_towers_generate_under_the_names_of_the_checkpoint_and_of_the_model(
    engine: tuple[VLLMEngine, asyncio.Runner], images: ImagesInProcess, folder: Path, tmp_path: Path
) -> None:
    running, loop = engine
    seen = SeenByTransformers(folder)
    for version in (1, 2):
        with torch.no_grad():
            for parameter in seen.model.parameters():
                parameter.mul_(1.1)
        if version == 1:
            seen.model.save_pretrained(tmp_path / "1")
            file = tmp_path / "1" / "model.safetensors"
            assert "visual.patch_embed.proj.weight" in load_file(file)
        else:
            file = tmp_path / "2.safetensors"
            save_file(seen.model.state_dict(), file)
        loop.run(running.weights.stage(version, file))
        loop.run(running.weights.swap(SwapOptions()))
        result = loop.run(play(running, images, folder, random.Random(3), []))
        assert seen.differences(result, images.kept).abs().max() < NEAR
        assert SeenByTransformers(folder).differences(result, images.kept).abs().mean() > NEAR
