"""The engine alone: its runner, and that seeds, scores, swaps, adapters and samplers do on it what they say."""

import asyncio
import os
from typing import Any

from safetensors.torch import load_file, save_file

from benchmarks.gpu_check.configs import Machine
from benchmarks.gpu_check.findings import Findings
from benchmarks.reference_model import write_adapter
from deployments.generation.engine import VLLMEngine
from deployments.generation.settings import EngineSettings
from deployments.policy.commands import SwapOptions
from deployments.protocols.generation import GenerationRequest, SamplingOptions, ScoringRequest
from service.startup.config import REPOSITORY

MODEL = REPOSITORY / "models" / "tiny"
PROMPT = list(range(20, 34))
LONGEST = 256
SCORE_TOLERANCE = 0.1


def request(name: str, new_tokens: int, **options: Any) -> GenerationRequest:
    return GenerationRequest(name, PROMPT, new_tokens, (), SamplingOptions(**options))


def scoring(name: str, ids: list[int], start: int) -> ScoringRequest:
    return ScoringRequest(name, ids, 1, (), SamplingOptions(), start=start)


def runner_of(worker: Any) -> dict[str, Any]:
    """Runs in a worker."""
    config = worker.vllm_config
    layers = config.compilation_config.static_forward_context.values()
    backends = {layer.attn_backend.get_name() for layer in layers if hasattr(layer, "attn_backend")}
    return {
        "runner": type(worker.model_runner).__module__,
        "async_scheduling": config.scheduler_config.async_scheduling,
        "executor": str(config.parallel_config.distributed_executor_backend),
        "attention": sorted(backends),
        "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
        "max_num_seqs": config.scheduler_config.max_num_seqs,
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "chunked_prefill": config.scheduler_config.enable_chunked_prefill,
    }


def check(machine: Machine, findings: Findings) -> None:
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    asyncio.run(check_engine(machine, findings))


async def check_engine(machine: Machine, findings: Findings) -> None:
    settings = EngineSettings.model_validate(
        machine.engine(MODEL, max_model_len=LONGEST, enable_lora=True, max_loras=2, max_lora_rank=8)
    )
    os.environ.update(settings.process_variables)
    engine = await VLLMEngine.start(settings.engine_args() | {"seed": 5}, 60.0)
    findings.add("an engine starts", True)
    for name, step in STEPS.items():
        with findings.attempt(name):
            held, figures = await asyncio.wait_for(step(engine, machine), 200)
            findings.add(name, held, **figures)
    engine.shutdown()


async def runner(engine: VLLMEngine, _: Machine) -> tuple[bool | None, dict[str, Any]]:
    [found] = await engine.llm.collective_rpc(runner_of)  # type: ignore[arg-type]
    return None, found


async def seeds(engine: VLLMEngine, _: Machine) -> tuple[bool, dict[str, Any]]:
    first, *others = await asyncio.gather(
        *(engine.generate(request(f"seed-{number}", 32, seed=3, ignore_eos=True)) for number in range(8))
    )
    far = max(abs(a - b) for other in others for a, b in zip(first.logprobs, other.logprobs, strict=True))
    same = all(list(other.token_ids) == list(first.token_ids) for other in others)
    return same, {"largest_difference": far}


async def streams(engine: VLLMEngine, _: Machine) -> tuple[bool, dict[str, Any]]:
    made = await asyncio.gather(
        *(engine.generate(request(f"free-{number}", 16, temperature=2.0, ignore_eos=True)) for number in range(32))
    )
    distinct = len({tuple(each.token_ids) for each in made})
    return distinct == len(made), {"distinct": distinct}


async def scores(engine: VLLMEngine, _: Machine) -> tuple[bool, dict[str, Any]]:
    made = await engine.generate(request("scored", 64, seed=9, ignore_eos=True))
    ids = [*PROMPT, *made.token_ids]
    full = (ids * 20)[:LONGEST]
    by_score, whole, *_others = await asyncio.gather(
        engine.generate(scoring("score", ids, len(PROMPT))),
        engine.generate(scoring("full", full, 1)),
        *(engine.generate(request(f"beside-{number}", 16)) for number in range(4)),
    )
    said = list(by_score.prompt_logprobs)  # type: ignore[attr-defined]
    far = max(abs(a - b) for a, b in zip(said, made.logprobs, strict=True))
    whole_count = len(whole.prompt_logprobs)  # type: ignore[attr-defined]
    return far < SCORE_TOLERANCE and whole_count == LONGEST - 1, {"largest_difference": far, "of_full": whole_count}


async def swaps(engine: VLLMEngine, machine: Machine) -> tuple[bool, dict[str, Any]]:
    """The weights change in each mode while generations run, and come back: equal checksums."""
    before = await engine.weights.checksum()
    weights = load_file(MODEL / "model.safetensors")
    changed = {name: (tensor.float() * 1.01).to(tensor.dtype) for name, tensor in weights.items()}
    other = machine.folder / "other.safetensors"
    save_file(changed, other)
    spans: dict[str, Any] = {}
    for number, mode in enumerate(("keep", "wait", "abort"), 1):
        file = other if number % 2 else MODEL / "model.safetensors"
        await engine.weights.stage(number, file)
        playing = [
            asyncio.create_task(engine.generate(request(f"{mode}-{one}", 200, seed=one, ignore_eos=True)))
            for one in range(8)
        ]
        async with asyncio.timeout(30):
            while engine.load().kv_tokens < 8 * 40:
                await asyncio.sleep(0.001)
        costs = await engine.weights.swap(SwapOptions(mode=mode))  # type: ignore[arg-type]
        made = await asyncio.gather(*playing)
        spans[mode] = {
            "spans": sorted({tuple(span.version for span in each.weight_versions) for each in made}),
            "ends": sorted({str(each.finish_reason) for each in made}),
            "tokens": sorted({len(each.token_ids) for each in made})[:3],
            "costs": str(costs),
        }
    changed_checksum = await engine.weights.checksum()
    await engine.weights.stage(4, MODEL / "model.safetensors")
    await engine.weights.swap(SwapOptions())
    back = await engine.weights.checksum()
    return back == before != changed_checksum and spans["keep"]["spans"] == [("0", "1")], spans


async def adapters(engine: VLLMEngine, machine: Machine) -> tuple[bool, dict[str, Any]]:
    folder = machine.folder / "adapter"
    write_adapter(folder, load_file(MODEL / "model.safetensors"), ["q_proj"], seed=0, scale=1.0)
    base = await engine.generate(request("base", 16, seed=3, ignore_eos=True))
    await engine.weights.stage_adapter(6, folder)
    await engine.weights.swap(SwapOptions())
    made = await engine.generate(request("adapter", 16, seed=3, ignore_eos=True))
    ids = [*PROMPT, *made.token_ids]
    scored, _ = await asyncio.gather(
        engine.generate(scoring("adapter-score", ids, len(PROMPT))), engine.generate(request("beside", 16))
    )
    said = list(scored.prompt_logprobs)  # type: ignore[attr-defined]
    far = max(abs(a - b) for a, b in zip(said, made.logprobs, strict=True))
    changes = max(abs(a - b) for a, b in zip(base.logprobs, made.logprobs, strict=True))
    versions = [span.version for span in made.weight_versions]
    return far < SCORE_TOLERANCE < changes and versions == ["6"], {"score": far, "change": changes, "named": versions}


async def canary(engine: VLLMEngine, _: Machine) -> tuple[bool, dict[str, Any]]:
    await engine.canary.try_current()
    await engine.weights.stage(5, MODEL / "model.safetensors")
    await engine.weights.swap(SwapOptions())
    changes_nothing = await engine.canary.try_current()
    return changes_nothing, {"alive": await engine.is_alive()}


async def samplers(engine: VLLMEngine, _: Machine) -> tuple[bool, dict[str, Any]]:
    """Top-p and top-k, with and without log-probabilities: the second is where vLLM would compile a kernel."""
    from vllm.inputs.engine import tokens_input
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    made = await engine.generate(request("top-p", 32, top_p=0.8, top_k=10, ignore_eos=True))
    params = SamplingParams(
        top_p=0.8, top_k=10, max_tokens=32, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY
    )
    async for output in engine.llm.generate(tokens_input(PROMPT), params, request_id="plain"):
        plain = output.outputs[0]
    return len(made.token_ids) == len(plain.token_ids) == 32 and await engine.is_alive(), {}


async def interruptions(engine: VLLMEngine, _: Machine) -> tuple[bool | None, dict[str, Any]]:
    """A greedy generation that is interrupted and goes on from its tokens, beside one that is not."""
    whole = await engine.generate(request("whole", 120, temperature=0.0, ignore_eos=True))
    first = asyncio.create_task(engine.generate(request("cut", 120, temperature=0.0, ignore_eos=True)))
    async with asyncio.timeout(30):
        while engine.load().kv_tokens < 60:
            await asyncio.sleep(0.001)
    await engine.interrupt(["cut"])
    begun = await first
    ids = list(begun.token_ids)
    rest = await engine.generate(
        GenerationRequest(
            "rest", [*PROMPT, *ids], 120 - len(ids), (), SamplingOptions(temperature=0.0, ignore_eos=True)
        )
    )
    return [*ids, *rest.token_ids] == list(whole.token_ids), {"cut_at": len(ids)}


STEPS = {
    "runner and settings": runner,
    "equal seeds make equal tokens": seeds,
    "streams without a seed differ": streams,
    "scores are the log-probabilities of generation": scores,
    "weights change in each mode and come back": swaps,
    "the canary tells that nothing changed": canary,
    "an adapter changes what is generated and scored": adapters,
    "top-p and top-k without log-probabilities": samplers,
    "an interrupted greedy generation goes on as if it had not been": interruptions,
}
