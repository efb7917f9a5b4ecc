"""Of a long observation only as much is tokenized as its room needs, and what is kept is the same as of the whole."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from deployments.chat import text_encoder
from deployments.chat.chat_tokenizer import TransformersChatTokenizer
from deployments.chat.text_encoder import _MARGIN_CHARACTERS, SplittableText, TextEncoder
from deployments.failures import PromptRejected
from deployments.protocols.chat import ChatOptions
from rollout_client.contract.messages import PromptMessage
from rollout_env import ChatMessage
from tests.deployments.chat.observed import observed
from tests.paths import TINY_MODEL

RAW, CHAT = ChatOptions(observation_format="raw"), ChatOptions(observation_format="chat")
TEMPLATE = """{%- for message in messages -%}
<|{{ message['role'] }}|>{{ message['content'] | trim }}<|end|>
{%- endfor -%}{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"""
WORDS = ["the", "then", "number", "numbers", " ", "  ", "\n", "12345", "1234567", "'s", "é", "…", "!", "<|end|>"]


def word_tokenizer() -> Any:
    """A byte-level BPE that splits into words, as most models have."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["the number then there numbers 12345 1234567 's " * 20], trainer)
    tokenizer.add_special_tokens(["<|end|>", "<|user|>", "<|assistant|>"])
    make: Any = PreTrainedTokenizerFast
    return make(tokenizer_object=tokenizer, chat_template=TEMPLATE)


HF_WORDS = word_tokenizer()
words = TransformersChatTokenizer(HF_WORDS, split_special_tokens="observations")
characters = TransformersChatTokenizer.load(str(TINY_MODEL))
texts = st.lists(st.sampled_from(WORDS), min_size=200, max_size=600).map(" ".join)


def noted_lengths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets the lengths of the texts that are encoded from now on."""
    lengths: list[int] = []
    encode = TextEncoder.encode

    def noted(encoder: TextEncoder, text: str | SplittableText) -> Any:
        lengths.append(len(text if isinstance(text, str) else text.text))
        return encode(encoder, text)

    monkeypatch.setattr(TextEncoder, "encode", noted)
    return lengths


def said(content: str) -> ChatMessage:
    return {"role": "user", "content": content}


@settings(max_examples=settings().max_examples // 2)
@given(texts, st.integers(0, 40), st.sampled_from([RAW, CHAT]))
def test_what_is_kept_of_a_long_text_would_be_kept_of_the_whole(text: str, room: int, options: ChatOptions) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        lengths = noted_lengths(monkeypatch)
        by_beginning = observed(words, said(text), [], options, room)
        assert lengths
        monkeypatch.setattr(text_encoder, "_CHARACTERS_PER_TOKEN", 10**6)
        assert observed(words, said(text), [], options, room) == by_beginning
    assert by_beginning.was_cut
    assert len(by_beginning.token_ids) == room


def test_a_beginning_that_ends_inside_a_word_or_token_is_not_trusted() -> None:
    """Without a space the text is cut anywhere: its end is a part of a word, then a part of an added token."""
    whole = "x" * 3 + "numbers" * 400 + "<|end|>" * 400
    as_tokens = TransformersChatTokenizer(HF_WORDS, split_special_tokens="none")
    for tokenizer, text in ((as_tokens, whole), (words, SplittableText(whole, is_split=True))):
        expected = TextEncoder(HF_WORDS).encode(text).ids
        for room in (1, 300, 350, 700, 1000, len(expected) - 1):
            assert list(observed(tokenizer, said(whole), [], RAW, room).token_ids) == expected[:room]


def test_a_text_without_words_is_tokenized_up_to_what_its_room_can_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = noted_lengths(monkeypatch)
    kept = observed(characters, said("a" * 10_000_000), [], RAW, 1000)
    assert (len(kept.token_ids), kept.content, kept.was_cut) == (1000, "a" * 1000, True)
    assert max(lengths) <= 1100 * len("<|endoftext|>") + _MARGIN_CHARACTERS


def test_a_prompt_of_too_many_tokens_is_refused() -> None:
    messages = [PromptMessage(role="user", content="a" * 1000)]
    [message] = characters.prompt(messages, CHAT, max_tokens=1006)
    assert len(message.token_ids) == 1006
    with pytest.raises(PromptRejected) as raised:
        characters.prompt(messages, CHAT, max_tokens=1005)
    assert str(raised.value) == (
        "The prompt has 1006 tokens and max_seq_len is 1005: shorten the prompt or raise max_seq_len."
    )
