"""Other weights for the embedded model, and how far the service's log-probabilities are from those of transformers."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks import reference_model
from benchmarks.reference_model import State, differences, logprobs_of, spans_of, token_ids_of, write_adapter
from rollout_client.contract.rollouts import SampleResult
from tests.paths import TINY_MODEL

TOLD_APART = 1.0
"""Of two log-probabilities of a token: those of 5% of the tokens by two perturbed models are farther apart. bfloat16
rounds most by less than 0.06; of ten thousands, one was off by 0.25."""


def tiny_state() -> State:
    return load_file(TINY_MODEL / "model.safetensors")


def perturbed(seed: int, scale: float = 0.1) -> State:
    """The embedded model's weights, each changed by about `scale` of itself; equal seeds give equal weights."""
    return reference_model.perturbed(tiny_state(), seed, scale)


def model_of(state: State) -> Any:
    return reference_model.model_of(TINY_MODEL, state)


def adapter_folder(folder: Path, seed: int, width: int = 128, **options: Any) -> State:
    """Writes an adapter of every layer with `write_adapter`; returns what it adds to the weights."""
    base = {f"model.layers.{layer}.self_attn.o_proj.weight": torch.empty(width, width) for layer in range(4)}
    return write_adapter(folder, base, ["o_proj"], seed, **options)


def logprob_differences(
    results: Iterable[SampleResult], models: Mapping[str, Any], temperature: float = 1.0
) -> dict[str, torch.Tensor]:
    """By version: for each token the difference (absolute) between what the service and what `models[version]` says."""
    return {version: each.abs() for version, each in differences(results, models, temperature).items()}


def of_other_weights(results: Iterable[SampleResult], models: Mapping[str, Any], temperature: float = 1.0) -> list[str]:
    """The tokens that are clearly of other weights than the version that they are labelled with says.

    Of a token whose log-probabilities by the models differ by more than `TOLD_APART`, the one that the service says
    must be nearest to that of its version. A mean over thousands of tokens does not show a span that ends one too late.
    """
    found = []
    for result in results:
        ids = token_ids_of(result)
        by_model = {version: logprobs_of(model, ids, temperature) for version, model in models.items()}
        for named, places, said in spans_of(result):
            own = by_model[named][places]
            for version in models.keys() - {named}:
                other = by_model[version][places]
                is_other = ((own - other).abs() > TOLD_APART) & ((said - other).abs() < (said - own).abs())
                found += [
                    f"token {place} of {len(said)} of version {named}, sample {result.idx}: {said[place]:.2f}, and "
                    f"it gives {own[place]:.2f} and version {version} {other[place]:.2f}"
                    for place in is_other.nonzero()[:, 0].tolist()
                ]
    return found
