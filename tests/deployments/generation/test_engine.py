"""What the engine's outputs become. Generating itself needs an engine: `tests/live/test_engine.py`."""

import asyncio
import math
from pathlib import Path

import pytest
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput

from deployments.failures import GenerationLost, GenerationNotFinite
from deployments.generation.engine import VLLMEngine
from deployments.generation.engine_requests import generation_of
from deployments.protocols.generation import Generation, packed_ids, packed_logprobs
from tests.model_families import random_model, save_with_tokenizer

# Importing vLLM takes seconds.
pytestmark = pytest.mark.slow


def test_patches_of_experts_are_refused_before_an_engine_starts(tmp_path: Path) -> None:
    folder = save_with_tokenizer(random_model("qwen3-moe", 0), tmp_path)
    with pytest.raises(ValueError, match=r"^patch_deltas: .* has 4 experts, .* Leave patch_deltas out"):
        asyncio.run(VLLMEngine.start({"model": str(folder), "dtype": "float32"}, patches_deltas=True))


def completion(*logprobs: float, tokens: int | None = None) -> CompletionOutput:
    count = len(logprobs) if tokens is None else tokens
    flat = FlatLogprobs()
    flat.logprobs = list(logprobs)
    return CompletionOutput(0, "", list(range(count)), None, flat, finish_reason="stop")


def test_a_generation_has_packed_ids_and_log_probabilities() -> None:
    assert generation_of(completion(-0.5, -2.0, 0.0), None) == Generation(
        packed_ids([0, 1, 2]), packed_logprobs([-0.5, -2.0, 0.0]), "stop"
    )


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_log_probability_that_is_not_finite_fails_the_generation(value: float) -> None:
    with pytest.raises(GenerationNotFinite) as raised:
        generation_of(completion(-0.5, value, math.nan), None)
    assert str(raised.value) == f"The engine gave {value} as the log-probability of token 1 of 3."


def test_missing_log_probabilities_fail_the_generation() -> None:
    with pytest.raises(GenerationLost, match=r"^The engine gave 1 log-probabilities for 2 tokens\.$"):
        generation_of(completion(-0.5, tokens=2), None)
