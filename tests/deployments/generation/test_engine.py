"""A real engine, where what the service as a whole cannot be brought to do is done to it."""

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
from deployments.generation.engine import VLLMEngine, WeightsNotLoaded
from deployments.policy.commands import SwapOptions
from deployments.protocols import Generation, GenerationRequest, SamplingOptions


def test_an_engine_whose_swap_broke_midway_says_why_and_makes_no_token_with_half_of_the_weights(
    tmp_path: Path,
) -> None:
    settings = engine_in(yaml.safe_load(Path("serve_config.cpu.yaml").read_text()))
    tensors, broken = load_file(Path(settings.model) / "model.safetensors"), tmp_path / "model.safetensors"
    save_file(tensors | {max(tensors): torch.zeros(3)}, broken)

    async def story() -> list[Generation | BaseException]:
        engine = await VLLMEngine.start(settings.engine_args() | {"max_num_seqs": 8})
        try:
            await engine.stage(1, broken)
            long = SamplingOptions(ignore_eos=True)
            generations = [
                asyncio.create_task(engine.generate(GenerationRequest(f"{number}", [5, 6], 2000, (), long)))
                for number in range(4)
            ]
            while engine.ongoing_generations < len(generations):
                await asyncio.sleep(0.01)
            with pytest.raises(WeightsNotLoaded, match="Attempted to load weight"):
                await engine.swap(SwapOptions())
            assert engine.loaded.version == 0
            return await asyncio.gather(*generations, return_exceptions=True)
        finally:
            engine.shutdown()
            disable_envs_cache()

    # What vLLM sets itself goes with it.
    with patch.dict(os.environ, settings.environment_variables):
        ends = asyncio.run(story())
    assert [type(end) for end in ends] == [GenerationLost] * 4
