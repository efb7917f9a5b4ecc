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
from rollout_client.tensors.rollout_tensors import PaddingSide
from tests.deployments.images.pictures import ImagesInProcess
from tests.live.test_images import CUTS_S, NEAR, differences_of_batch, play, seeing_engine
from tests.vision_model import SeenByTransformers

pytestmark = pytest.mark.long
pytest.importorskip("torchvision", reason="The processor of Qwen2.5-VL needs torchvision: make test-torchvision")

from tests.mrope_model import save_mrope_model  # noqa: E402 - imports torchvision


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
    engine: tuple[VLLMEngine, asyncio.Runner], images: ImagesInProcess, folder: Path, padding_side: PaddingSide
) -> None:
    assert differences_of_batch(engine, images, folder, padding_side).abs().max() < NEAR


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
