"""Weights of the embedded model that are made here."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers.utils import logging

from benchmarks.reference_model import State, load, merged, model_of, perturbed, write_adapter

NORM = "model.norm.weight"
ADAPTER_SCALE = 0.055
FULL_SCALE = 0.1
"""Each value of full weights is changed by about this share of itself: enough for other log-probabilities."""
DELTA_SHARE = 0.01
"""Of the values of a tensor, how many a delta changes."""


class KnownWeights:
    """Args: `model` is the folder of the checkpoint that the service starts with."""

    def __init__(self, model: Path) -> None:
        self._model = model
        progress: Any = logging
        progress.disable_progress_bar()
        self.initial: State = load_file(model / "model.safetensors")
        self._reference = model_of(model)

    def perturbed(self, seed: int) -> State:
        """The initial weights, every value changed; equal seeds give equal weights."""
        return perturbed(self.initial, seed, FULL_SCALE)

    def partly_changed(self, state: State, seed: int) -> State:
        """`state` with every `DELTA_SHARE` of its values doubled."""
        generator = torch.Generator().manual_seed(seed)
        return {
            name: torch.where(torch.rand(tensor.shape, generator=generator) < DELTA_SHARE, 2 * tensor, tensor)
            for name, tensor in state.items()
        }

    def unusable(self, value: float) -> State:
        """Weights with one tensor full of the value.

        Validation refuses NaN. The largest finite value is accepted by it; the model's log-probabilities with it are
        not finite.
        """
        return self.initial | {NORM: torch.full_like(self.initial[NORM], value)}

    def save_adapter(self, folder: Path, base: State, seed: int) -> State:
        """Writes a LoRA adapter for `base` as PEFT does; returns the weights with the adapter merged into them."""
        return merged(base, write_adapter(folder, base, ["o_proj"], seed, scale=ADAPTER_SCALE))

    def loaded(self, state: State) -> Any:
        """The model with these weights, until others are loaded."""
        load(self._reference, state)
        return self._reference
