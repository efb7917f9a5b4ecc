"""A reward model with random weights, for demos and tests: what it says means nothing."""

from pathlib import Path
from typing import Any

TINY_MODEL = Path(__file__).resolve().parent.parent / "models" / "tiny"


def write_reward_model(folder: Path, hidden_size: int, layers: int) -> None:
    """Writes a Llama for sequence classification, with the tokenizer of the embedded model."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

    tokenizer: Any = AutoTokenizer.from_pretrained(TINY_MODEL)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    fields: dict[str, Any] = {"num_labels": 1}
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=4096,
        **fields,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.2,
    )
    model: Any = LlamaForSequenceClassification
    model(config).save_pretrained(folder)
