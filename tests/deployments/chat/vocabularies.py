"""Tokenizers of several kinds with the same control tokens, made here or of the embedded models."""

import json
from functools import cache
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.paths import SMALL_MODEL

TEMPLATE = (
    "<s>{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'tool' %}<tool_response>\n{{ message.content | tojson }}\n</tool_response>"
    "{% elif message.role == 'assistant' %}{{ message.content.split('</think>')[-1] }}"
    "{% elif message.content is string %}{{ message.content | trim }}"
    "{% else %}{% for part in message.content %}{{ part.text }}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Strips, joins parts without anything between them, writes JSON, and looks for `</think>` in answers."""
SPECIAL = ["<s>", "<|im_start|>", "<|im_end|>", "<|im_end|>2", "</s>"]
MARKERS = ["<tool_response>", "</tool_response>", "</think>"]
"""Not special, but written by the template."""
WORDS = ["\n\n", "<b>", "word"]
"""Added tokens that are ordinary text."""
CORPUS = [
    "the user said <|im_end|> and then <|im_start|>assistant",
    "a list[int] = [1, 2]; <b>bold</b>",
    "two  words\n\n",
]
SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"
KINDS = ["byte-level", "sentencepiece", "unigram", "added"]


@cache
def tokenizer_of(kind: str) -> PreTrainedTokenizerFast:
    """A tokenizer of the kind. In vocabularies of sentencepiece, control tokens are entries."""
    own = [*SPECIAL, *MARKERS]
    pieces = [*"abcdefghijklmnopqrstuvwxyz0123456789<>|_/[]:,;= \n{}\"\\'.-", "\u4e2d", "\u00e9", "\u2581"]
    backend: Any
    if kind == "byte-level":
        backend = Tokenizer(models.BPE())
        backend.normalizer = normalizers.NFC()
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(SPLIT), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        backend.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        backend.train_from_iterator(
            CORPUS * 9, trainers.BpeTrainer(vocab_size=340, initial_alphabet=alphabet, show_progress=False)
        )
    elif kind == "sentencepiece":
        vocabulary = [*own, "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, "\u2581a", "an", "im"]
        merges = [("\u2581", "a"), ("a", "n"), ("i", "m")]
        backend = Tokenizer(
            models.BPE(
                {piece: place for place, piece in enumerate(vocabulary)}, merges, unk_token="<unk>", byte_fallback=True
            )
        )
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        backend.decoder = decoders.Sequence(
            [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    elif kind == "unigram":
        scored = [("<unk>", 0.0), *((token, 0.0) for token in own), *((piece, -3.0) for piece in pieces), ("im", -4.0)]
        scored += [(f"<0x{byte:02X}>", -9.0) for byte in range(256)]
        backend = Tokenizer(models.Unigram(scored, unk_id=0, byte_fallback=True))
        backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    else:
        backend = Tokenizer.from_file(str(SMALL_MODEL / "tokenizer.json"))
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    backend.add_tokens([*(AddedToken(token, normalized=False) for token in MARKERS), *WORDS])
    make: Any = PreTrainedTokenizerFast
    tokenizer: PreTrainedTokenizerFast = make(tokenizer_object=backend, chat_template=TEMPLATE, eos_token="<|im_end|>")
    return tokenizer


def without_control_tokens(tokenizer: PreTrainedTokenizerFast, control: list[str]) -> Tokenizer:
    """The same tokenizer, to which control tokens are ordinary text."""
    stored = json.loads(tokenizer.backend_tokenizer.to_str())
    stored["added_tokens"] = [token for token in stored["added_tokens"] if token["content"] not in control]
    vocabulary = stored["model"]["vocab"]
    if isinstance(vocabulary, list):
        stored["model"]["vocab"] = [[f"\u0001{text}" if text in control else text, score] for text, score in vocabulary]
    return Tokenizer.from_str(json.dumps(stored))
