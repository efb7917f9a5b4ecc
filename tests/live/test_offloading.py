"""KV cache offloading by vLLM's scheduler, over copies that need no GPU: what is read from host memory, and what never.

Without a GPU a test helper makes the copies; all else is vLLM's. Log-probabilities are held against transformers.
"""

import asyncio
import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.reference_model import State, logprobs_of, model_of
from deployments.generation.engine import VLLMEngine
from deployments.policy.commands import SwapOptions
from deployments.protocols.generation import Generation, GenerationRequest, SamplingOptions
from rollout_client.contract.policy import PauseMode
from tests.live.engines import RunningEngine, float32_settings, running_engine
from tests.live.forward_pass import adapter_folder, perturbed, tiny_state
from tests.live.host_blocks import SECONDS, on_processors
from tests.live.prefix_cache import HOST_MEMORY, found_in_prefix_cache
from tests.paths import TINY_MODEL

pytestmark = pytest.mark.long
BLOCK, BLOCKS, LONGEST = 32, 40, 1024
PROMPT, TURN = 500, 60
IN_BLOCKS = PROMPT // BLOCK * BLOCK
TRANSFER_S = 0.2
ROUNDING = 1e-3
PUSHES = [(at, mode, False) for at in ("store", "load") for mode in ("keep", "wait", "abort")]
PUSHES += [("nothing", "keep", False), ("load", "keep", True)]
draw = random.Random(0)


@pytest.fixture(scope="module")
def engine() -> Iterator[RunningEngine]:
    settings = float32_settings(
        TINY_MODEL,
        LONGEST,
        enable_chunked_prefill=False,
        kv_transfer_config=on_processors(gigabytes=0.25),
        environment_variables={SECONDS: str(TRANSFER_S)},
        enable_lora=True,
        max_lora_rank=8,
    )
    with running_engine(settings, block_size=BLOCK, num_gpu_blocks_override=BLOCKS) as started:
        yield started


def prompt_of(tokens: int = PROMPT) -> list[int]:
    sums = (f"{a} + {b} = {a + b}. " for a, b in iter(lambda: (draw.randrange(99), draw.randrange(99)), None))
    return list("".join(islice(sums, tokens)).encode()[:tokens])


async def generate(engine: VLLMEngine, prompt: list[int], tokens: int = 8) -> Generation:
    sampling = SamplingOptions(temperature=1.0, seed=7, ignore_eos=True)
    return await engine.generate(GenerationRequest(f"{draw.random()}", prompt, tokens, (), sampling))


async def evict(engine: VLLMEngine) -> None:
    """Fills the engine's own cache with other prompts."""
    for _ in range(BLOCKS * BLOCK // LONGEST + 1):
        await generate(engine, prompt_of(LONGEST - 8), 1)


def farthest(made: Generation, prompt: list[int], state: State) -> float:
    """Largest difference of its log-probabilities from those of a forward pass with `state`."""
    expected = logprobs_of(model_of(TINY_MODEL, state, torch.float32), [*prompt, *made.token_ids])[len(prompt) - 1 :]
    return float((expected - torch.tensor(made.logprobs)).abs().max())


def pushed(folder: Path, version: int) -> tuple[Path, State]:
    save_file(state := perturbed(version), file := folder / "pushed.safetensors")
    return file, state


async def swap(engine: VLLMEngine, file: Path, options: SwapOptions, is_trial: bool = False) -> None:
    version = engine.weights.loaded.version + 1
    await engine.weights.stage(version, file)
    await engine.weights.swap(options, is_trial)
    engine.weights.accept()


def test_a_second_turn_finds_its_evicted_prefix_in_host_memory(engine: RunningEngine) -> None:
    llm, loop = engine

    async def second_turn(prompt: list[int], evicts: bool) -> Any:
        first = await generate(llm, prompt)
        if evicts:
            await evict(llm)
        own, host = found_in_prefix_cache(), found_in_prefix_cache(HOST_MEMORY)
        later = [*prompt, *first.token_ids, *range(20, 29)]
        second = await generate(llm, later, TURN)
        # The same weights once more: both caches are empty again.
        await swap(llm, TINY_MODEL / "model.safetensors", SwapOptions())
        return later, second, (found_in_prefix_cache() - own, found_in_prefix_cache(HOST_MEMORY) - host)

    async def turns() -> Any:
        prompt = prompt_of()
        return [await second_turn(prompt, evicts) for evicts in (False, True)]

    (_, own, found_there), (later, loaded, found) = loop.run(turns())
    assert (found_there, found) == ((IN_BLOCKS, 0), (0, IN_BLOCKS))
    assert loaded.cached_tokens == own.cached_tokens == IN_BLOCKS
    assert (list(loaded.token_ids), list(loaded.logprobs)) == (list(own.token_ids), list(own.logprobs))
    assert farthest(loaded, later, tiny_state()) < ROUNDING


@pytest.mark.parametrize(("under_way", "mode", "is_trial"), PUSHES)
def test_after_new_weights_no_block_of_the_old_ones_is_read(
    engine: RunningEngine, tmp_path: Path, under_way: str, mode: PauseMode, is_trial: bool
) -> None:
    llm, loop = engine
    file, state = pushed(tmp_path, llm.weights.loaded.version + 1)

    async def push() -> Any:
        prompt = prompt_of()
        await generate(llm, prompt)
        if under_way != "store":
            await evict(llm)
        begun = []
        if under_way == "load":
            before = found_in_prefix_cache(HOST_MEMORY)
            begun.append(asyncio.create_task(generate(llm, prompt, TURN)))
            async with asyncio.timeout(30):
                while found_in_prefix_cache(HOST_MEMORY) == before:
                    await asyncio.sleep(0.01)
        await swap(llm, file, SwapOptions(mode), is_trial)
        after = [await generate(llm, prompt), await generate(llm, prompt, TURN)]
        await evict(llm)
        return prompt, [*after, await generate(llm, prompt)], await asyncio.gather(*begun)

    prompt, after, ended = loop.run(push())
    assert {each.finish_reason for each in ended} <= {"length" if mode == "wait" else "abort"}
    assert [each.cached_tokens for each in after] == [0, IN_BLOCKS, IN_BLOCKS]
    for each in after:
        assert {span.version for span in each.weight_versions} == {str(llm.weights.loaded.version)}
        assert farthest(each, prompt, state) < ROUNDING


def test_blocks_of_one_adapter_are_not_read_for_another_or_for_its_base(engine: RunningEngine, tmp_path: Path) -> None:
    llm, loop = engine
    file, state = pushed(tmp_path, llm.weights.loaded.version + 1)
    added = [adapter_folder(tmp_path / str(seed), seed) for seed in range(2)]
    prompt = prompt_of()

    async def play(seed: int) -> list[Generation]:
        await llm.weights.stage_adapter(100, tmp_path / str(seed))
        await llm.weights.swap(SwapOptions())
        made = [await generate(llm, prompt)]
        await evict(llm)
        return [*made, await generate(llm, prompt)]

    async def play_all() -> list[list[Generation]]:
        await swap(llm, file, SwapOptions())
        base = [await generate(llm, prompt)]
        await evict(llm)
        return [[*base, await generate(llm, prompt)], *[await play(seed) for seed in (0, 1, 0)]]

    played = loop.run(play_all())
    assert [[each.cached_tokens for each in of_one] for of_one in played] == [[0, IN_BLOCKS]] * 4
    for of_one, extra in zip(played, [{}, added[0], added[1], added[0]], strict=True):
        merged = {name: tensor + extra.get(name, 0) for name, tensor in state.items()}
        assert max(farthest(each, prompt, merged) for each in of_one) < ROUNDING


def test_blocks_are_kept_where_a_push_keeps_the_prefix_cache(engine: RunningEngine, tmp_path: Path) -> None:
    llm, loop = engine
    file, _ = pushed(tmp_path, llm.weights.loaded.version + 1)

    async def push() -> list[int]:
        prompt = prompt_of()
        await swap(llm, file, SwapOptions())
        await generate(llm, prompt)
        await evict(llm)
        found = []
        for options in (SwapOptions(reset_prefix_cache=False), SwapOptions()):
            await swap(llm, file, options)
            found.append((await generate(llm, prompt)).cached_tokens)
        return found

    assert loop.run(push()) == [IN_BLOCKS, 0]
