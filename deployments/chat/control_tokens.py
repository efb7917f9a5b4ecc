"""Control tokens that a text spells, such as `<|im_end|>` in what a tool has found: they stay text.

A tokenizer reads the spelling of a control token as that token, whoever wrote it. So a text could end its message and
forge another one. Before a chat template gets texts that are not trusted, each spelling in them is replaced by a
placeholder of letters and digits, which a template carries like any word. In the rendering, control tokens are then the
template's own. For the tokenizer the spellings come back, and the template's own control tokens get a spelling that
nobody knows: `_SplittingTokenizer` reads these as the control tokens, and all others as ordinary text.

Guarantees: a rendering without spelled control tokens is tokenized as it is, by the model's own tokenizer. Otherwise
each spelling is tokenized as the model's own tokenizer does where nothing is a control token, and decodes to itself.
Some tokenizers find control tokens in what their normalizer makes of a text, such as `<|im_end|>` in capitals: for them
a text that is normalized counts as one that spells control tokens.
"""

import json
import random
import re
import secrets
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any

from tokenizers import AddedToken, Encoding, Tokenizer
from tokenizers.normalizers import Normalizer
from transformers import PreTrainedTokenizerFast

from deployments.chat.chat_template import Chat
from deployments.protocols.chat import SplitSpecialTokens

PRIVATE_CHARACTERS = range(0x100000, 0x10FFFE)
"""No text has these characters in the order in which a process draws them."""
WRITTEN_BY_THE_TRAINER = frozenset({"system", "developer", "user"})
"""Roles of a prompt; those of other messages are the model itself and tools."""
SHORTEST_MARKER = 3
"""Characters of an added token that can be told from punctuation."""
ANSWERS = frozenset({"assistant", "model"})
NOT_TEXT = frozenset({"role", "type"})
"""Fields of a message that a template compares and does not write."""


@dataclass(frozen=True, slots=True)
class SplittableText:
    """A rendering for the tokenizer: as it is, or split if it has control tokens that are data."""

    text: str
    """As long as the rendering, and equal to it but for the template's own control tokens if `is_split`."""
    is_split: bool
    moved: tuple[tuple[int, int], ...] = ()
    """Indexes in the text that had placeholders after which the placeholders' lengths move the text, and how far."""

    def __len__(self) -> int:
        return len(self.text)

    def beginning(self, length: int) -> "SplittableText":
        return SplittableText(self.text[:length], self.is_split, self.moved)

    def index(self, place: int) -> int:
        """The index in `text` of what was at `place` of the text with placeholders."""
        before = bisect_right(self.moved, place, key=lambda move: move[0])
        return place + (self.moved[before - 1][1] if before else 0)


class ControlTokens:
    """The control tokens of a tokenizer: the special ones, and others which its chat template writes.

    Models are trained with markers that are added tokens without being special, such as `<tool_call>`. Added tokens
    that the template does not write are ordinary words, such as runs of spaces. Holds no state; threads may share it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        template = _template_text(tokenizer)
        control = {
            str(token): token.special
            for token in tokenizer.added_tokens_decoder.values()
            if not token.single_word and (token.special or _is_marker_of(str(token), template))
        }
        self.spellings = [*control]
        self._numbers = {spelling: number for number, spelling in enumerate(self.spellings)}
        self._any = _alternatives(self.spellings)
        self._special = _alternatives([spelling for spelling, special in control.items() if special])
        self._beginnings = frozenset(each[:end] for each in self.spellings for end in range(1, len(each)))
        self._ends = frozenset(each[start:] for each in self.spellings for start in range(1, len(each)))
        self._longest = max(map(len, self.spellings), default=0)
        name = secrets.token_hex(8)
        self._border = f"q{name}qq"
        """Stands where a text begins or ends with a part of a spelling, which what follows could complete."""
        self._placeholder = f"q{name}q{{}}q"
        self._normalized = self._placeholder.format(len(self.spellings))
        """Begins a text that the normalizer changes, if that can spell a control token."""
        self._normalizer = _normalizer_that_spells(tokenizer, self.spellings)
        self._placeholders = re.compile(f"q{name}q([0-9]*)q")
        self._secret = dict(zip(self.spellings, _secret_spellings(self.spellings), strict=True))

    def splitting_tokenizer(self, backend: Tokenizer) -> "_SplittingTokenizer":
        return _SplittingTokenizer(backend, self._secret)

    def hidden_in_observation(self, messages: Chat, split: SplitSpecialTokens, echoes_answers: bool = False) -> Chat:
        """The messages with placeholders for all control tokens that they spell.

        Of answers that are echoes of the model's own the special ones alone, as in a prompt: a caller that leaves out
        messages has the model's answers behind another one of its own.
        """
        if split == "none":
            return messages
        of_answers = self._special if echoes_answers else self._any
        return [
            self._without(message, of_answers if message.get("role") in ANSWERS else self._any) for message in messages
        ]

    def hidden_in_prompt(self, chat: Chat, split: SplitSpecialTokens, echoes_answers: bool) -> Chat:
        """The messages with placeholders for control tokens in texts that are data.

        With `observations` these are tools' results, and what follows an answer; and answers that are echoes of the
        model's own: what they spell was sampled as ordinary text. Of answers the special ones alone: by others, such as
        `<think>`, a template tells their parts.
        """
        if split == "none":
            return chat
        hidden = []
        has_answer = False
        for message in chat:
            role = message.get("role")
            if role in ANSWERS:
                has_answer = True
                pattern = self._special if echoes_answers or split == "all" else None
            else:
                is_data = has_answer or split == "all" or role not in WRITTEN_BY_THE_TRAINER
                pattern = self._any if is_data else None
            hidden.append(message if pattern is None else self._without(message, pattern))
        return hidden

    def hidden_in_tools(self, tools: list[dict[str, Any]] | None, split: SplitSpecialTokens) -> Any:
        """The descriptions of tools with placeholders for control tokens, if they are data."""
        return self._hidden(tools, self._any) if split == "all" else tools

    def _without(self, message: Mapping[str, Any], pattern: re.Pattern[str]) -> dict[str, Any]:
        return {name: value if name in NOT_TEXT else self._hidden(value, pattern) for name, value in message.items()}

    def _hidden(self, value: Any, pattern: re.Pattern[str]) -> Any:
        """The value with placeholders in all of its texts, names of fields included."""
        if isinstance(value, str):
            return self._hidden_in_text(value, pattern)
        if isinstance(value, Mapping):
            return {self._hidden(name, pattern): self._hidden(each, pattern) for name, each in value.items()}
        return [self._hidden(each, pattern) for each in value] if isinstance(value, list | tuple) else value

    def _hidden_in_text(self, text: str, pattern: re.Pattern[str]) -> str:
        # A template may strip the text.
        stripped = text.strip()
        lengths = range(1, min(self._longest, len(stripped) + 1))
        starts = any(stripped[:length] in self._ends for length in lengths)
        ends = any(stripped[-length:] in self._beginnings for length in lengths)
        hidden = pattern.sub(lambda found: self._placeholder.format(self._numbers[found[0]]), text)
        is_changed = self._is_changed(stripped)
        if starts or is_changed:
            start = len(hidden) - len(hidden.lstrip())
            hidden = hidden[:start] + (self._normalized if is_changed else self._border) + hidden[start:]
        if ends:
            end = len(hidden.rstrip())
            hidden = hidden[:end] + self._border + hidden[end:]
        return hidden

    def _is_changed(self, text: str) -> bool:
        """Whether the tokenizer may find control tokens in a text in which they are not spelled as they are."""
        return self._normalizer is not None and self._normalizer.normalize_str(text) != text

    def restored(self, text: str) -> SplittableText:
        """A rendering of messages with placeholders, for the tokenizer."""
        pieces = self._placeholders.split(text)
        if len(pieces) == 1:
            return SplittableText(text, is_split=False)
        spelled = [self._spelling(number) for number in pieces[1::2]]
        moved, place, shift = list[tuple[int, int]](), 0, 0
        for before, number, spelling in zip(pieces[::2], pieces[1::2], spelled, strict=False):
            length = len(self._placeholder.format(number))
            place += len(before) + length
            shift += len(spelling) - length
            moved.append((place, shift))
        kept = pieces[::2]
        plain = _interleaved(kept, spelled)
        own = [
            (start + found.start(), start + found.end())
            for start, piece in zip([0, *map(sum, moved)], kept, strict=True)
            for found in self._any.finditer(piece)
        ]
        is_changed = str(len(self.spellings)) in pieces[1::2]
        if not is_changed and own == [found.span() for found in self._any.finditer(plain)]:
            return SplittableText(plain, is_split=False, moved=tuple(moved))
        secret = [self._any.sub(lambda found: self._secret[found[0]], piece) for piece in kept]
        return SplittableText(_interleaved(secret, spelled), is_split=True, moved=tuple(moved))

    def all_data(self, text: str) -> SplittableText:
        """A text in which no control token is the template's own."""
        return SplittableText(text, is_split=self._any.search(text) is not None or self._is_changed(text))

    def _spelling(self, number: str) -> str:
        return self.spellings[int(number)] if number and int(number) < len(self.spellings) else ""


class _SplittingTokenizer:
    """A tokenizer to which control tokens have other spellings. Shares its vocabulary with the one it is made of."""

    def __init__(self, backend: Tokenizer, secret: Mapping[str, str]) -> None:
        """`secret` has the other spelling of each control token, of the same length."""
        added = dict(sorted(backend.get_added_tokens_decoder().items()))
        known = backend.get_vocab(with_added_tokens=False)
        # Ids from here on are given to tokens that the model's vocabulary does not have.
        gaps = max(known.values(), default=-1) + 1 - len(known)
        fillers = [AddedToken(spelling) for spelling in _secret_spellings(["filler"] * gaps)]
        tokens = [*fillers, *(_renamed(token, secret) for token in added.values())]
        tokenizer = _tokenizer_of(backend.model, backend, tokens)
        if any(backend.token_to_id(each) in tokenizer.encode(each, add_special_tokens=False).ids for each in secret):
            # Some models find whole tokens of their vocabulary in a text, control tokens too.
            tokenizer = _tokenizer_of(_model_without(backend, secret), backend, tokens)
        self._tokenizer = tokenizer
        renamed_ids = {
            token_id: tokenizer.token_to_id(_renamed(token, secret).content) for token_id, token in added.items()
        }
        self._original_ids = {
            other: token_id for token_id, other in renamed_ids.items() if other not in {None, token_id}
        }

    def encode(self, text: str) -> "TokenizedText":
        # Unlike `encode`, this releases the interpreter's lock while it works.
        [encoding] = self._tokenizer.encode_batch([text], add_special_tokens=False)
        return TokenizedText([self._original_ids.get(each, each) for each in encoding.ids], encoding)


@dataclass(frozen=True, slots=True)
class TokenizedText:
    """The tokens of a text, with their places in it."""

    ids: list[int]
    encoding: Encoding

    def __len__(self) -> int:
        return len(self.ids)

    def start_of(self, token: int) -> int:
        """Index of the token's first character."""
        return self._characters_of(token)[0]

    def end_of(self, token: int) -> int:
        """Index after the token's last character."""
        return self._characters_of(token)[1]

    def _characters_of(self, token: int) -> tuple[int, int]:
        characters: tuple[int, int] | None = self.encoding.token_to_chars(token)
        if characters is None:
            raise IndexError(f"There is no token {token} among {len(self)}.")
        return characters


def _tokenizer_of(model: Any, like: Tokenizer, added: list[AddedToken]) -> Tokenizer:
    tokenizer = Tokenizer(model)
    if like.normalizer is not None:
        tokenizer.normalizer = like.normalizer
    if like.pre_tokenizer is not None:
        tokenizer.pre_tokenizer = like.pre_tokenizer
    tokenizer.add_tokens(added)
    return tokenizer


def _model_without(backend: Tokenizer, secret: Mapping[str, str]) -> Any:
    """The tokenizer's model, in whose vocabulary the control tokens have other spellings."""
    stored = json.loads(backend.to_str())
    vocabulary = stored["model"]["vocab"]
    if isinstance(vocabulary, dict):
        stored["model"]["vocab"] = {secret.get(token, token): token_id for token, token_id in vocabulary.items()}
    else:
        stored["model"]["vocab"] = [[secret.get(token, token), score] for token, score in vocabulary]
    return Tokenizer.from_str(json.dumps({**stored, "added_tokens": []})).model


def _renamed(token: AddedToken, secret: Mapping[str, str]) -> AddedToken:
    content = secret.get(token.content, token.content)
    return AddedToken(
        content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=token.special,
    )


def _secret_spellings(spellings: Sequence[str]) -> list[str]:
    """Another spelling for each, of the same length, of characters that no text has in this order."""
    draw = random.SystemRandom()
    drawn: dict[str, None] = {}
    for spelling in spellings:
        wanted = len(drawn) + 1
        while len(drawn) < wanted:
            drawn["".join(map(chr, draw.choices(PRIVATE_CHARACTERS, k=len(spelling))))] = None
    return [*drawn]


def _template_text(tokenizer: PreTrainedTokenizerFast) -> str:
    """All of the tokenizer's chat templates."""
    template: Any = tokenizer.chat_template
    return "".join(template.values()) if isinstance(template, dict) else template or ""


def _normalizer_that_spells(tokenizer: PreTrainedTokenizerFast, control: Sequence[str]) -> Normalizer | None:
    """The tokenizer's normalizer, if control tokens are looked for in what it makes of a text; `None` if not.

    Most are looked for before. The others are added tokens that are normalized too, and entries of a vocabulary that
    the model finds whole.
    """
    backend = tokenizer.backend_tokenizer
    if backend.normalizer is None:
        return None
    known = frozenset(control)
    are_normalized = any(token.normalized for token in tokenizer.added_tokens_decoder.values() if str(token) in known)
    bare = _tokenizer_of(backend.model, backend, [])
    are_found = any(backend.token_to_id(each) in bare.encode(each, add_special_tokens=False).ids for each in control)
    return backend.normalizer if are_normalized or are_found else None


def _is_marker_of(token: str, template: str) -> bool:
    """Whether an added token is one by which the template tells parts of a conversation, and no word or white space."""
    is_marker = len(token) >= SHORTEST_MARKER and not token[0].isalnum() and not any(map(str.isspace, token))
    return is_marker and token in template


def _alternatives(spellings: Iterable[str]) -> re.Pattern[str]:
    """A pattern that finds the longest spelling at a place, in time that does not grow with their number."""
    trie: dict[str, Any] = {}
    for spelling in spellings:
        node = trie
        for character in spelling:
            node = node.setdefault(character, {})
        node[""] = {}
    return re.compile(_pattern_of(trie) if trie else "(?!)")


def _pattern_of(trie: Mapping[str, Any]) -> str:
    branches = [re.escape(character) + _pattern_of(after) for character, after in trie.items() if character]
    if not branches:
        return ""
    found = branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"
    return f"(?:{found})?" if "" in trie else found


def _interleaved(pieces: Sequence[str], between: Sequence[str]) -> str:
    return "".join(chain.from_iterable(zip_longest(pieces, between, fillvalue="")))
