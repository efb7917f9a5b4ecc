"""A random model of the shape of Qwen2.5-0.5B, for machines that can download none."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config

from benchmarks.reference_model import State
from rollout_client.contract.rollouts import SampleResult

SHAPE = {
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
}
SMALL_SHAPE = SHAPE | {
    "vocab_size": 2048,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
"""For a machine without a card."""
END = "<|im_end|>"
LOGIT_DEVIATION = 2.0
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_model(folder: Path, shape: dict[str, Any], seed: int = 0) -> State:
    """Writes the model with a tokenizer; returns its weights in bfloat16."""
    write_tokenizer(folder, shape["vocab_size"])
    end = shape["vocab_size"] - 1
    config = Qwen2Config(**shape, eos_token_id=end, bos_token_id=None, pad_token_id=end)
    config.architectures = ["Qwen2ForCausalLM"]
    config.dtype = "bfloat16"
    config.save_pretrained(folder)
    state = random_state(config, seed)
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    return state


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Writes a tokenizer whose every id has a text; the last one ends a message."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    count = vocab_size - 2
    words = letters + [f"t{number}" for number in range(count - len(letters))]
    tokenizer = Tokenizer(models.BPE(vocab={word: place for place, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|im_start|>", special=True), AddedToken(END, special=True)])
    wrapped: Any = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, eos_token=END, chat_template=TEMPLATE
    )
    wrapped.save_pretrained(folder)


def random_state(config: Qwen2Config, seed: int) -> State:
    """Weights whose logits have a deviation of `LOGIT_DEVIATION`; equal seeds give equal weights."""
    generator = torch.Generator().manual_seed(seed)
    with torch.device("meta"):
        shapes = AutoModelForCausalLM.from_config(config).state_dict()  # type: ignore[no-untyped-call]
    shapes.pop("lm_head.weight")  # Tied to the embeddings.
    state = {}
    for name, tensor in shapes.items():
        noise = torch.randn(tensor.shape, generator=generator)
        if name.endswith("norm.weight"):
            value = 1 + 0.1 * noise
        elif tensor.ndim == 1:
            value = 0.1 * noise
        else:
            scale = LOGIT_DEVIATION if "embed_tokens" in name else 1.0
            value = scale * noise * tensor.shape[-1] ** -0.5
        state[name] = value.bfloat16()
    return state


def distinct(samples: Iterable[SampleResult]) -> int:
    """How many different first answers there are."""
    answers = (next(message for message in sample.message_log if message.role == "assistant") for sample in samples)
    return len({tuple(answer.token_ids) for answer in answers})


def figures_of(difference: torch.Tensor) -> dict[str, float]:
    absolute = difference.abs()
    return {
        "tokens": absolute.numel(),
        "mean": round(absolute.mean().item(), 5),
        "largest": round(absolute.max().item(), 4),
        "bias": round(difference.mean().item(), 6),
    }
