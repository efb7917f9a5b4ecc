"""The KV cache in host memory: read back as it was, dropped with new weights; what reading and computing take."""

import asyncio
import os
import random
import time

from safetensors.torch import save_file

from benchmarks.gpu_check.configs import Machine
from benchmarks.gpu_check.engine_part import SCORE_TOLERANCE, scoring
from benchmarks.gpu_check.findings import Findings
from benchmarks.gpu_check.random_model import SHAPE, SMALL_SHAPE, write_model
from benchmarks.reference_model import perturbed
from deployments.generation.engine import VLLMEngine
from deployments.generation.settings import EngineSettings
from deployments.policy.commands import SwapOptions
from deployments.protocols.generation import Generation, GenerationRequest, SamplingOptions
from tests.live.host_blocks import on_processors


def check(machine: Machine, findings: Findings) -> None:
    asyncio.run(check_offloading(machine, findings))


async def check_offloading(machine: Machine, findings: Findings) -> None:
    """Two prompts of the longest kind do not fit into the engine's own cache."""
    on_card, folder = machine.device == "gpu", machine.folder / "model"
    save_file(perturbed(write_model(folder, SHAPE if on_card else SMALL_SHAPE), 1), folder / "other.safetensors")
    longest, host = (16384, {"kv_offloading_size": 1}) if on_card else (2048, {"kv_transfer_config": on_processors(1)})
    sizes = {"max_model_len": longest + 32, "block_size": 32, "num_gpu_blocks_override": longest // 32 + 4}
    settings = EngineSettings.model_validate(machine.engine(folder, **sizes, **host))
    os.environ.update(settings.process_variables)
    engine = await VLLMEngine.start(settings.engine_args(), 120.0)
    for version, tokens, file in ((1, longest // 4, "other"), (2, longest, "model")):
        prompt, other, last = (random.choices(range(1000), k=length) for length in (tokens, longest, tokens))
        (made, first_s), _, (again, load_s), _ = [await play(engine, ids) for ids in (prompt, other, prompt, last)]
        # What is stored of the last prompt is on its way.
        await engine.weights.stage(version, folder / f"{file}.safetensors")
        await engine.weights.swap(SwapOptions())
        pushed, _ = await play(engine, last)
        scored = await engine.generate(scoring(file, [*last, *pushed.token_ids], tokens))
        far = max(abs(a - b) for a, b in zip(pushed.logprobs, scored.prompt_logprobs, strict=True))  # type: ignore[attr-defined]
        same = list(made.token_ids) == list(again.token_ids) and again.cached_tokens > tokens - 64
        held = same and pushed.cached_tokens == 0 and far < SCORE_TOLERANCE
        findings.add(f"{tokens} tokens", held, compute_s=first_s, load_s=load_s, loaded=again.cached_tokens, far=far)
    engine.shutdown()


async def play(engine: VLLMEngine, prompt: list[int]) -> tuple[Generation, float]:
    began, sampling = time.perf_counter(), SamplingOptions(seed=1, ignore_eos=True)
    return await engine.generate(GenerationRequest(f"{began}", prompt, 8, (), sampling)), time.perf_counter() - began
