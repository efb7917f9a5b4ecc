"""Other weights for the embedded model, and how far the service's log-probabilities are from those of transformers."""

from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks import reference_model
from benchmarks.reference_model import State, differences, logprobs_of, spans_of, token_ids_of, write_adapter
from rollout_client.contract.rollouts import SampleResult
from tests.paths import TINY_MODEL


def tiny_state() -> State:
    return load_file(TINY_MODEL / "model.safetensors")


def perturbed(seed: int, scale: float = 0.1) -> State:
    """The embedded model's weights, each changed by about `scale` of itself; equal seeds give equal weights."""
    return reference_model.perturbed(tiny_state(), seed, scale)


def model_of(state: State) -> Any:
    return reference_model.model_of(TINY_MODEL, state)


def float32_model_of(state: State) -> Any:
    """For means over many tokens: it takes a fifth of the time where the processor emulates bfloat16."""
    return reference_model.model_of(TINY_MODEL, state, torch.float32)


def adapter_folder(folder: Path, seed: int, width: int = 128, **options: Any) -> State:
    """Writes an adapter of every layer with `write_adapter`; returns what it adds to the weights."""
    base = {f"model.layers.{layer}.self_attn.o_proj.weight": torch.empty(width, width) for layer in range(4)}
    return write_adapter(folder, base, ["o_proj"], seed, **options)


def logprob_differences(
    results: Iterable[SampleResult], models: Mapping[str, Any], temperature: float = 1.0
) -> dict[str, torch.Tensor]:
    """By version: for each token the difference (absolute) between what the service and what `models[version]` says."""
    return {version: each.abs() for version, each in differences(results, models, temperature).items()}


def differences_where_weights_change(
    results: Iterable[SampleResult], models: Mapping[str, Any], temperature: float = 1.0
) -> torch.Tensor:
    """[messages, 2, 2]: of each message of two versions, for the last token of the first and the first of the second.

    The differences (absolute) of what the service says to what the token's version gives, then to what the other one
    gives. A mean over thousands of tokens does not show a span that ends one too late; nor does one token: bfloat16
    rounds some 20 of 210,000 by 0.3 to 1.04, mostly beside tokens rounded by less than 0.001. So compare medians.
    """
    found = []
    for result in results:
        meetings = [pair for pair in pairwise(spans_of(result)) if pair[0].places.stop == pair[1].places.start]
        if not meetings:
            continue
        by_model = {version: logprobs_of(model, token_ids_of(result), temperature) for version, model in models.items()}
        for first, second in meetings:
            tokens = slice(second.places.start - 1, second.places.start + 1)
            said = torch.stack([first.logprobs[-1], second.logprobs[0]])
            before, after = by_model[first.version][tokens], by_model[second.version][tokens]
            own, other = torch.stack([before[0], after[1]]), torch.stack([after[0], before[1]])
            found.append(torch.stack([(said - own).abs(), (said - other).abs()]))
    return torch.stack(found)
