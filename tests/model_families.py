"""Tiny random transformers models of the families that trainers push, with the embedded model's tokenizer."""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from tests.paths import TINY_MODEL

SIZES: Mapping[str, Any] = {
    "vocab_size": 262,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 261,
    "pad_token_id": 256,
    "tie_word_embeddings": False,
}
EXPERTS: Mapping[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SLIDING_WINDOW = 16
FAMILIES: Mapping[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**SIZES),
    "qwen2.5": lambda: Qwen2Config(**{**SIZES, "tie_word_embeddings": True}),
    "qwen3": lambda: Qwen3Config(**{**SIZES, "tie_word_embeddings": True, "num_attention_heads": 4}),
    "qwen3-moe": lambda: Qwen3MoeConfig(**SIZES, **EXPERTS),
    "gemma2": lambda: Gemma2Config(
        **{**SIZES, "tie_word_embeddings": True}, query_pre_attn_scalar=32, sliding_window=SLIDING_WINDOW
    ),
    "gemma3": lambda: Gemma3TextConfig(
        **{**SIZES, "tie_word_embeddings": True},
        query_pre_attn_scalar=32,
        sliding_window=SLIDING_WINDOW,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "mistral": lambda: MistralConfig(**SIZES, sliding_window=None),
    "mixtral": lambda: MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
}
MIXTURES = {"qwen3-moe", "mixtral"}
LOGIT_SCALE = 0.1
"""Standard deviation of the logits, about. In bfloat16 their rounding errors grow with them."""


def dtype_of(family: str) -> torch.dtype:
    """Mixtures of experts are compared in float32: rounding changes which experts a token is routed to."""
    return torch.float32 if family in MIXTURES else torch.bfloat16


def random_model(family: str, seed: int) -> Any:
    """A model whose parameters are all random, norms and biases included; equal seeds give equal models."""
    model: Any = AutoModelForCausalLM.from_config(FAMILIES[family]())  # type: ignore[no-untyped-call]
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                parameter.add_(0.2 * noise)
            else:
                scale = LOGIT_SCALE if name.startswith(("lm_head", "model.embed_tokens")) else 1.0
                parameter.copy_(scale * noise * parameter.shape[-1] ** -0.5)
    return model.to(dtype_of(family)).eval()


def save_with_tokenizer(model: Any, folder: Path) -> Path:
    """As an engine loads it."""
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TINY_MODEL / name, folder)
    return folder
