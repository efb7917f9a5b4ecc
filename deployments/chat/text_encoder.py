"""Text to tokens and back, without a chat template. Control tokens that a text spells, such as `<|im_end|>`, stay text.

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

from tokenizers import AddedToken, Tokenizer
from tokenizers.normalizers import Normalizer
from transformers import PreTrainedTokenizerFast

from deployments.chat.chat_template import Chat
from deployments.protocols.chat import SplitSpecialTokens

_CHARACTERS_PER_TOKEN = 8
"""More than a token of ordinary text has: so much of a long text is tokenized first."""
_MARGIN_CHARACTERS = 2**16
"""More than the end of a text can change of the tokens before it, if the text has no words to tell."""
_MOST_CHARACTERS_WITH_LOCK = 2**12
_MOST_TOKENS_WITH_LOCK = 2**10
"""Tokenizing so much takes a millisecond at most. For less, getting the interpreter's lock back from another thread
takes longer than the work."""
_PRIVATE_CHARACTERS = range(0x100000, 0x10FFFE)
"""No text has these characters in the order in which a process draws them."""
_WRITTEN_BY_THE_TRAINER = frozenset({"system", "developer", "user"})
"""Roles of a prompt; those of other messages are the model itself and tools."""
_SHORTEST_MARKER = 3
"""Characters of an added token that can be told from punctuation."""
_ANSWERS = frozenset({"assistant", "model"})
_NOT_TEXT = frozenset({"role", "type"})
"""Fields of a message that a template compares and does not write."""


@dataclass(frozen=True, slots=True)
class SplittableText:
    """A rendering for the tokenizer: as it is, or split if it has control tokens that are data."""

    text: str
    """As long as the rendering, and equal to it but for the template's own control tokens if `is_split`."""
    is_split: bool
    moved: tuple[tuple[int, int], ...] = ()
    """Indexes in the text that had placeholders after which the placeholders' lengths move the text, and how far."""

    def beginning(self, length: int) -> "SplittableText":
        return SplittableText(self.text[:length], self.is_split, self.moved)

    def index(self, place: int) -> int:
        """The index in `text` of what was at `place` of the text with placeholders."""
        before = bisect_right(self.moved, place, key=lambda move: move[0])
        return place + (self.moved[before - 1][1] if before else 0)


class _ControlTokens:
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
            self._without(message, of_answers if message.get("role") in _ANSWERS else self._any) for message in messages
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
            if role in _ANSWERS:
                has_answer = True
                pattern = self._special if echoes_answers or split == "all" else None
            else:
                is_data = has_answer or split == "all" or role not in _WRITTEN_BY_THE_TRAINER
                pattern = self._any if is_data else None
            hidden.append(message if pattern is None else self._without(message, pattern))
        return hidden

    def hidden_in_tools(self, tools: list[dict[str, Any]] | None, split: SplitSpecialTokens) -> Any:
        """The descriptions of tools with placeholders for control tokens, if they are data."""
        return self._hidden(tools, self._any) if split == "all" else tools

    def _without(self, message: Mapping[str, Any], pattern: re.Pattern[str]) -> dict[str, Any]:
        return {name: value if name in _NOT_TEXT else self._hidden(value, pattern) for name, value in message.items()}

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
        kept = pieces[::2]
        if len(pieces) == 1:
            return SplittableText(text, is_split=False)
        spelled = [self._spelling(number) for number in pieces[1::2]]
        moved, place, shift = list[tuple[int, int]](), 0, 0
        for before, number, spelling in zip(kept, pieces[1::2], spelled, strict=False):
            length = len(self._placeholder.format(number))
            place += len(before) + length
            shift += len(spelling) - length
            moved.append((place, shift))
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
    encoding: Any
    """The `Encoding` of tokenizers."""

    def __len__(self) -> int:
        return len(self.ids)

    def start_of(self, token: int) -> int:
        """Index of the token's first character."""
        start: int = self.encoding.token_to_chars(token)[0]
        return start

    def end_of(self, token: int) -> int:
        """Index after the token's last character."""
        end: int = self.encoding.token_to_chars(token)[1]
        return end


class TextEncoder:
    """A fast tokenizer that lets other threads run while it works on a long text. Threads may share it."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self.control_tokens = _ControlTokens(tokenizer)
        self._splitting = self.control_tokens.splitting_tokenizer(self._backend)
        self.longest_token = max(map(len, tokenizer.get_vocab()))
        """In characters."""
        self._longest_added = max((len(str(token)) for token in tokenizer.added_tokens_decoder.values()), default=0)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        if len(token_ids) <= _MOST_TOKENS_WITH_LOCK:
            short: str = self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
            return short
        # Unlike `decode`, this releases the interpreter's lock while it works.
        [text] = self._backend.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)
        return text

    def encode(self, text: str | SplittableText) -> TokenizedText:
        if isinstance(text, SplittableText):
            return self._splitting.encode(text.text) if text.is_split else self.encode(text.text)
        if len(text) <= _MOST_CHARACTERS_WITH_LOCK:
            encoding = self._backend.encode(text, add_special_tokens=False)
        else:
            # Unlike `encode`, this releases the interpreter's lock while it works.
            [encoding] = self._backend.encode_batch([text], add_special_tokens=False)
        return TokenizedText(encoding.ids, encoding)

    def encode_beginning(self, text: SplittableText, tokens: int) -> TokenizedText:
        """Tokenizes as much of `text` as its first `tokens` tokens and the offset of the next one need.

        They are those of the whole text. A tokenizer first looks for added tokens, then splits what is between them
        into words, from left to right and with at most one character of the next word in view, and merges bytes within
        words alone. So the end of a text decides only about added tokens that begin near it and about its last words:
        tokens before these are the same, whatever follows. If a text has no words to tell, as with a tokenizer that
        does not split, it is tokenized up to the longest that so many tokens can cover, and `_MARGIN_CHARACTERS` more.
        """
        longest = tokens * self.longest_token + _MARGIN_CHARACTERS
        length = tokens * _CHARACTERS_PER_TOKEN + self._longest_added
        while length < min(longest, len(text.text)):
            # Between words, so that a run of digits is split as in the whole text.
            end = text.text.rfind(" ", length // 2, length)
            beginning = length if end < 0 else end
            encoding = self.encode(text.beginning(beginning))
            if self._is_settled(encoding, tokens, beginning):
                return encoding
            length *= 4
        return self.encode(text.beginning(longest))

    def _is_settled(self, encoding: TokenizedText, tokens: int, length: int) -> bool:
        """Whether the first `tokens` tokens of a text and the one after them do not depend on what follows the text."""
        if len(encoding) <= tokens or encoding.end_of(tokens) > length - self._longest_added:
            return False
        word_of = encoding.encoding.token_to_word
        word, last_word = word_of(tokens), word_of(len(encoding) - 1)
        return word is not None and last_word is not None and word < last_word - 1


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
    return AddedToken(**{**token.__getstate__(), "content": secret.get(token.content, token.content)})


def _secret_spellings(spellings: Sequence[str]) -> list[str]:
    """Another spelling for each, of the same length, of characters that no text has in this order."""
    draw = random.SystemRandom()
    drawn: dict[str, None] = {}
    for spelling in spellings:
        wanted = len(drawn) + 1
        while len(drawn) < wanted:
            drawn["".join(map(chr, draw.choices(_PRIVATE_CHARACTERS, k=len(spelling))))] = None
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
    is_marker = len(token) >= _SHORTEST_MARKER and not token[0].isalnum() and not any(map(str.isspace, token))
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
