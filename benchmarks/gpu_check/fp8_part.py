"""New bfloat16 weights into an engine that quantizes them to FP8 as it loads them."""

import asyncio
import os

from safetensors.torch import save_file

from benchmarks.gpu_check.configs import Machine
from benchmarks.gpu_check.engine_part import PROMPT, request, scoring
from benchmarks.gpu_check.findings import Findings
from benchmarks.gpu_check.random_model import SHAPE, write_model
from benchmarks.reference_model import perturbed
from deployments.generation.engine import VLLMEngine
from deployments.generation.settings import EngineSettings
from deployments.policy.commands import SwapOptions


def check(machine: Machine, findings: Findings) -> None:
    if machine.device == "cpu":
        findings.add("FP8", None, note="needs a card")
        return
    asyncio.run(check_fp8(machine, findings))


async def check_fp8(machine: Machine, findings: Findings) -> None:
    folder = machine.folder / "model"
    state = write_model(folder, SHAPE)
    settings = EngineSettings.model_validate(machine.engine(folder, max_model_len=1024, quantization="fp8_per_tensor"))
    os.environ.update(settings.process_variables)
    engine = await VLLMEngine.start(settings.engine_args() | {"seed": 5}, 120.0)
    findings.add("an engine with FP8 starts", True)
    name = "weights pushed into FP8 are those that are loaded at a start"
    with findings.attempt(name):
        made = await engine.generate(request("made", 64, seed=1, ignore_eos=True))
        ids = [*PROMPT, *made.token_ids]
        scores = [await scored(engine, "at-the-start", ids)]
        files = [machine.folder / "other.safetensors", folder / "model.safetensors"]
        save_file(perturbed(state, 1), files[0])
        costs = []
        for version, file in enumerate(files, 1):
            await engine.weights.stage(version, file)
            costs.append(str(await engine.weights.swap(SwapOptions())))
            scores.append(await scored(engine, f"after-{version}", ids))
        first, other, again = scores
        back = max(abs(a - b) for a, b in zip(first, again, strict=True))
        changed = max(abs(a - b) for a, b in zip(first, other, strict=True))
        findings.add(name, back < 0.01 < changed, back=back, changed=changed, costs=costs)
    engine.shutdown()


async def scored(engine: VLLMEngine, name: str, ids: list[int]) -> list[float]:
    result = await engine.generate(scoring(name, ids, len(PROMPT)))
    return list(result.prompt_logprobs)  # type: ignore[attr-defined]
