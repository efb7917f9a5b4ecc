"""A real engine without the service around it: what cannot be brought about in the running service."""

import asyncio
import os
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from vllm.envs import disable_envs_cache

from benchmarks.bare_engine import engine_in
from deployments.failures import GenerationLost
from deployments.generation.engine import VLLMEngine
from deployments.generation.settings import EngineSettings
from deployments.generation.weight_updater import WeightsNotLoaded
from deployments.policy.replicas.commands import SwapOptions
from deployments.protocols import Generation, GenerationRequest, SamplingOptions
from tests.paths import REPOSITORY

LONG = SamplingOptions(ignore_eos=True)
ENGINE_DIED = "The engine died; Serve replaces the replica."


@pytest.fixture
def settings() -> EngineSettings:
    return engine_in(yaml.safe_load((REPOSITORY / "serve_config.cpu.yaml").read_text()))


def test_after_a_swap_that_failed_halfway_the_engine_says_why_and_generates_no_token(
    settings: EngineSettings, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tensors, broken = load_file(Path(settings.model) / "model.safetensors"), tmp_path / "model.safetensors"
    save_file(tensors | {max(tensors): torch.zeros(3)}, broken)

    async def play() -> list[Generation | BaseException]:
        engine = await VLLMEngine.start(settings.engine_args() | {"max_num_seqs": 8})
        try:
            await engine.weights.stage(1, broken)
            generations = [
                asyncio.create_task(engine.generate(GenerationRequest(f"{number}", [5, 6], 2000, (), LONG)))
                for number in range(4)
            ]
            async with asyncio.timeout(60):
                while engine.load().ongoing_generations < len(generations):
                    await asyncio.sleep(0.01)
            with pytest.raises(WeightsNotLoaded, match="Attempted to load weight"):
                await engine.weights.swap(SwapOptions())
            assert engine.weights.loaded.version == 0
            ends = await asyncio.gather(*generations, return_exceptions=True)
            assert not await engine.is_alive()
            return ends
        finally:
            engine.shutdown()
            disable_envs_cache()

    # vLLM sets variables of its own, which end with the patch.
    with patch.dict(os.environ, settings.environment_variables):
        ends = asyncio.run(play())
    assert [type(end) for end in ends] == [GenerationLost] * 4
    ours = [record for record in caplog.records if record.name == "rollout_service.generation"]
    assert [record.getMessage() for record in ours if record.levelname == "ERROR"] == [ENGINE_DIED]
    assert sorted(vars(record)["generation_id"] for record in ours if record.levelname == "WARNING") == list("0123")


def test_an_unknown_weight_transfer_backend_is_refused_with_the_backends_that_exist(settings: EngineSettings) -> None:
    arguments = settings.engine_args() | {"weight_transfer_config": {"backend": "ncl"}}
    with pytest.raises(ValueError, match=r"backend: 'ncl' does not exist; vLLM has .*\bipc\b.*\bnccl\b"):
        asyncio.run(VLLMEngine.start(arguments))
