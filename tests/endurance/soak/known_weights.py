"""Weights of the embedded model that are made here, and the log-probabilities that transformers computes with them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.utils import logging

State = dict[str, torch.Tensor]
NORM = "model.norm.weight"
ADAPTER_RANK = 4
ADAPTER_SCALE = 0.07
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
        self._reference: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)

    def perturbed(self, seed: int) -> State:
        """The initial weights, every value changed; equal seeds give equal weights."""
        generator = torch.Generator().manual_seed(seed)
        return {
            name: (tensor.float() * (1 + FULL_SCALE * torch.randn(tensor.shape, generator=generator))).to(tensor.dtype)
            for name, tensor in self.initial.items()
        }

    def partly_changed(self, state: State, seed: int) -> State:
        """`state` with every `DELTA_SHARE` of its values doubled."""
        generator = torch.Generator().manual_seed(seed)
        return {
            name: torch.where(torch.rand(tensor.shape, generator=generator) < DELTA_SHARE, 2 * tensor, tensor)
            for name, tensor in state.items()
        }

    def delta(self, base: State, state: State) -> State:
        """The tensors of a push of `kind=delta` that changes `base`, full weights, to `state`."""
        changes = State()
        for name, tensor in state.items():
            places = (tensor != base[name]).flatten().nonzero().flatten()
            gaps = torch.diff(places, prepend=torch.zeros(1, dtype=places.dtype))
            changes |= {f"{name}.gaps": gaps.to(torch.int32), f"{name}.values": tensor.flatten()[places]}
        return changes

    def with_nan(self) -> State:
        """Weights that validation refuses."""
        return self.initial | {NORM: torch.full_like(self.initial[NORM], torch.nan)}

    def overflowing(self) -> State:
        """Finite weights, which validation accepts; the model's log-probabilities with them are not finite."""
        largest = torch.finfo(self.initial[NORM].dtype).max
        return self.initial | {NORM: torch.full_like(self.initial[NORM], largest)}

    def save_adapter(self, folder: Path, base: State, seed: int) -> State:
        """Writes a LoRA adapter for `base` as PEFT does; returns the weights with the adapter merged into them."""
        generator = torch.Generator().manual_seed(seed)
        adapter, merged = State(), dict(base)
        for name in (name for name in base if name.endswith("self_attn.o_proj.weight")):
            rows, columns = base[name].shape
            module = f"base_model.model.{name.removesuffix('.weight')}"
            a = ADAPTER_SCALE * torch.randn(ADAPTER_RANK, columns, generator=generator)
            b = ADAPTER_SCALE * torch.randn(rows, ADAPTER_RANK, generator=generator)
            adapter |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
            merged[name] = (base[name].float() + b @ a).to(base[name].dtype)
        folder.mkdir()
        save_file(adapter, folder / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "r": ADAPTER_RANK, "lora_alpha": ADAPTER_RANK, "target_modules": ["o_proj"]}
        (folder / "adapter_config.json").write_text(json.dumps(config | {"bias": "none"}))
        return merged

    def logprobs(self, state: State, token_ids: Sequence[int]) -> torch.Tensor:
        """[len(token_ids) - 1]: of each token but the first, after those before it, at temperature 1."""
        self._reference.load_state_dict(state, strict=False)
        self._reference.tie_weights()
        ids = torch.tensor(token_ids)
        with torch.inference_mode():
            logprobs = torch.log_softmax(self._reference(ids[None]).logits[0].float(), dim=-1)
        return logprobs[torch.arange(len(ids) - 1), ids[1:]]
