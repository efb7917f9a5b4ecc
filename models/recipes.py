"""Shared by the recipes of the embedded models: a byte tokenizer, conversations to learn from, sampling and saving."""

# mypy: disable-error-code="no-untyped-call"

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast

from rollout_env import ChatMessage

NO_LOSS = -100
PAD = 256
"""The first special token of every model."""
NEWLINE = ord("\n")
ROLES = ("system", "user", "assistant", "tool")
ROLE_TOKENS = ["<|endoftext|>", *(f"<|{role}|>" for role in ROLES), "<|end|>"]
"""Special tokens of the models that mark roles by one token."""
END = PAD + ROLE_TOKENS.index("<|end|>")


# --- Tokenizer --------------------------------------------------------------------------------------------------------


def byte_symbols() -> list[str]:
    """The printable character that stands for each byte in a byte-level vocabulary, by byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    rest = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(rest)) for byte in range(256)]


def byte_tokenizer(
    special: Sequence[str], markers: Sequence[str] = (), *, end: str, positions: int, chat_template: str
) -> PreTrainedTokenizerFast:
    """One token a byte, whose id is the byte, then others: any text comes back as it was, however it is split.

    Args:
        special: tokens from id 256 on, which decoding can skip; the first one pads.
        markers: tokens after these, which are part of the text and never skipped.
        end: the special token that ends a turn.
        positions: the longest text that the model takes, in tokens.
    """
    vocabulary = {symbol: byte for byte, symbol in enumerate(byte_symbols())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in markers])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=special[0],
        eos_token=end,
        clean_up_tokenization_spaces=False,
        model_max_length=positions,
        chat_template=chat_template,
    )


# --- Data -------------------------------------------------------------------------------------------------------------


class Conversation(NamedTuple):
    """Token ids and, aligned with them, the ids to learn: `NO_LOSS` where nothing is learnt."""

    token_ids: list[int]
    labels: list[int]


def no_images(_: ChatMessage) -> list[int]:
    return []


def conversation_of(
    messages: Sequence[ChatMessage],
    unlearnt: Collection[int] = (),
    images: Callable[[ChatMessage], list[int]] = no_images,
) -> Conversation:
    """Renders as chat templates with `ROLE_TOKENS` do; learnt are the assistant's tokens and the `<|end|>` behind them.

    Args:
        unlearnt: indices of messages that are shown only.
        images: the tokens before the text of a message.
    """
    token_ids: list[int] = []
    labels: list[int] = []
    for index, message in enumerate(messages):
        said = [*images(message), *message["content"].encode(), END]
        learnt = message["role"] == "assistant" and index not in unlearnt
        token_ids += [PAD + 1 + ROLES.index(message["role"]), NEWLINE, *said, NEWLINE]
        labels += [NO_LOSS, NO_LOSS, *(said if learnt else [NO_LOSS] * len(said)), NO_LOSS]
    return Conversation(token_ids, labels)


def padded(rows: Sequence[Sequence[int]], padding: int) -> torch.Tensor:
    """(batch, longest): rows padded on the right, where causal attention never looks."""
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[padding] * (longest - len(row))] for row in rows])


# --- Models -----------------------------------------------------------------------------------------------------------


def generation_config(end: int, **options: Any) -> GenerationConfig:
    """Samples at temperature 1 until `end`."""
    return GenerationConfig(do_sample=True, temperature=1.0, eos_token_id=end, pad_token_id=PAD, **options)


@torch.inference_mode()
def sampled(model: Any, prompts: Sequence[list[int]], end: int, max_new_tokens: int) -> list[list[int]]:
    """What the model says from prompts of any lengths, at most `max_new_tokens` tokens each."""
    longest = max(map(len, prompts))
    token_ids = torch.tensor([[PAD] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    settings = generation_config(end, top_k=0, top_p=1.0, max_new_tokens=max_new_tokens)
    said = model.generate(token_ids, attention_mask=mask, generation_config=settings)
    return [[token for token in row if token != PAD] for row in said[:, longest:].tolist()]


def save(model: Any, tokenizer: Any, output: Path) -> None:
    """Writes the model in bfloat16, with its tokenizer or processor."""
    model.bfloat16().save_pretrained(output)
    tokenizer.save_pretrained(output)
    # The weights are written readable by their owner alone, and a container may serve them as another user.
    (output / "model.safetensors").chmod(0o644)


def write_model_card(
    output: Path, card: str, model: Any, started: float, constants: Mapping[str, Any], **measured: Any
) -> None:
    """Fills in the model card and writes it.

    Args:
        started: when the recipe began, as `time.monotonic()`.
        constants: the globals of the recipe, of which the card names those in capitals.
    """
    filled = card.format(
        parameters=model.num_parameters(),
        config=model.config,
        megabytes=(output / "model.safetensors").stat().st_size / 1e6,
        minutes=(time.monotonic() - started) / 60,
        processor_minutes=time.process_time() / 60,
        threads=torch.get_num_threads(),
        torch_version=torch.__version__,
        transformers_version=transformers.__version__,
        **{name: value for name, value in constants.items() if name.isupper()},
        **measured,
    )
    (output / "README.md").write_text(filled, encoding="utf-8")
