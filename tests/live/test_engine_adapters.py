"""Adapters on a real engine: which names of their matrices it takes, and what the canary sees of a change."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from benchmarks.reference_model import write_adapter
from deployments.generation.adapters import ADAPTER_FILE, AdapterDoesNotFit, LoadedAdapter
from deployments.generation.engine import VLLMEngine
from deployments.policy.assembly import write_renamed
from deployments.policy.commands import SwapOptions
from deployments.policy.preparation import _names_in_the_model
from deployments.policy.weight_checks import layout_of
from rollout_client.weights.safetensors_file import read_header
from tests.live.engines import RunningEngine, running_engine, tiny_settings
from tests.paths import TINY_MODEL

pytestmark = pytest.mark.long
MODULE = "model.layers.0.self_attn.q_proj"
MAPPED = [
    f"base_model.model.{MODULE}",
    MODULE,
    f"base_model.model.module.{MODULE}",
    f"base_model.model._orig_mod.{MODULE}",
    f"module.base_model.model.{MODULE}",
    "base_model.model.model.language_model.layers.0.self_attn.q_proj",
]
UNKNOWN = [
    "base_model.model.encoder.layers.0.self_attn.q_proj",
    "base_model.model.model.layers.99.self_attn.q_proj",
    "base_model.model.lm.layers.0.self_attn.q_proj",
    "base_model.model.layers.0.self_attn.q_proj",
]


@pytest.fixture(scope="module")
def engine() -> Iterator[RunningEngine]:
    with running_engine(tiny_settings(), enable_lora=True, max_loras=2, max_lora_rank=8) as started:
        yield started


def adapter(folder: Path, module: str = MODULE, scale: float = 1.0) -> Path:
    weights = load_file(TINY_MODEL / "model.safetensors")
    write_adapter(folder, {module: weights[f"{MODULE}.weight"]}, ["q_proj"], seed=1, scale=scale, prefix="")
    return folder


def as_stored(folder: Path) -> Path:
    """The adapter as the policy store gives it to engines."""
    file = folder / ADAPTER_FILE
    header = read_header(file)
    names = _names_in_the_model("adapter", header, layout_of(TINY_MODEL))
    write_renamed(file, replace(header, metadata={}), names, folder / "renamed")
    (folder / "renamed").rename(file)
    return folder


@asynccontextmanager
async def loaded_from(engine: VLLMEngine, folder: Path) -> AsyncIterator[LoadedAdapter]:
    loaded = await engine.adapters.load("7", 7, folder)
    engine.adapters.hold(loaded)
    try:
        yield loaded
    finally:
        engine.adapters.give_up(loaded)


async def logprobs(engine: VLLMEngine, folder: Path) -> Any:
    async with loaded_from(engine, folder) as loaded:
        assert await engine.canary.try_adapter(loaded) is False
        return await engine.canary.play(loaded)


def test_names_of_wrapped_modules_reach_the_modules_that_they_name(engine: RunningEngine, tmp_path: Path) -> None:
    llm, loop = engine
    folders = [as_stored(adapter(tmp_path / str(number), module)) for number, module in enumerate(MAPPED)]
    played = [loop.run(logprobs(llm, folder)) for folder in folders]
    without = loop.run(llm.canary.play(None))
    assert played[0] != without
    assert played == [played[0]] * len(MAPPED)


@pytest.mark.parametrize("module", UNKNOWN)
def test_matrices_of_no_module_are_refused_by_name(engine: RunningEngine, tmp_path: Path, module: str) -> None:
    llm, loop = engine
    with pytest.raises(AdapterDoesNotFit, match=f"no module for {module}.lora_A.weight, {module}.lora_B.weight"):
        loop.run(llm.adapters.load("7", 7, adapter(tmp_path / "adapter", module)))


@pytest.mark.parametrize(("scale", "is_unseen"), [(1.0, False), (0.0, True), (1e-30, True)])
def test_an_adapter_may_be_zero_or_unseen(engine: RunningEngine, tmp_path: Path, scale: float, is_unseen: bool) -> None:
    llm, loop = engine

    async def play() -> bool:
        async with loaded_from(llm, adapter(tmp_path / "adapter", scale=scale)) as loaded:
            return await llm.canary.try_adapter(loaded)

    assert loop.run(play()) is is_unseen


def test_the_canary_tells_the_same_full_weights_from_others(engine: RunningEngine, tmp_path: Path) -> None:
    llm, loop = engine
    other = load_file(TINY_MODEL / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    other[name] = other[name] * 1.01
    save_file(other, tmp_path / "other.safetensors")

    async def swap_to(file: Path, version: int) -> bool:
        await llm.weights.stage(version, file)
        await llm.weights.swap(SwapOptions(), is_trial=True)
        changes_nothing = await llm.canary.try_current()
        llm.weights.accept()
        return changes_nothing

    files = [tmp_path / "other.safetensors"] * 2 + [TINY_MODEL / "model.safetensors"]
    assert [loop.run(swap_to(file, version)) for version, file in enumerate(files, 1)] == [False, True, False]
