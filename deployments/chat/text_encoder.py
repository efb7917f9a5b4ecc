"""Text to tokens and back, without a chat template: of a long text only the beginning that is needed."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerFast

from deployments.chat.control_tokens import ControlTokens, SplittableText, TokenizedText

CHARACTERS_PER_TOKEN = 8
"""More than a token of ordinary text has: so much of a long text is tokenized first."""
MARGIN_CHARACTERS = 2**16
"""More than the end of a text can change of the tokens before it, if the text has no words to tell."""
MOST_CHARACTERS_WITH_LOCK = 2**12
MOST_TOKENS_WITH_LOCK = 2**10
"""Tokenizing so much takes a millisecond at most. For less, getting the interpreter's lock back from another thread
takes longer than the work."""


class TextEncoder:
    """A fast tokenizer that lets other threads run while it works on a long text. Threads may share it."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self.control_tokens = ControlTokens(tokenizer)
        self._splitting = self.control_tokens.splitting_tokenizer(self._backend)
        self.longest_token = max(map(len, tokenizer.get_vocab()))
        """In characters."""
        self._longest_added = max((len(str(token)) for token in tokenizer.added_tokens_decoder.values()), default=0)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        if len(token_ids) <= MOST_TOKENS_WITH_LOCK:
            short: str = self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
            return short
        # Unlike `decode`, this releases the interpreter's lock while it works.
        [text] = self._backend.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)
        return text

    def encode(self, text: str | SplittableText) -> TokenizedText:
        if isinstance(text, SplittableText):
            return self._splitting.encode(text.text) if text.is_split else self.encode(text.text)
        if len(text) <= MOST_CHARACTERS_WITH_LOCK:
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
        does not split, it is tokenized up to the longest that so many tokens can cover, and `MARGIN_CHARACTERS` more.
        """
        longest = tokens * self.longest_token + MARGIN_CHARACTERS
        length = tokens * CHARACTERS_PER_TOKEN + self._longest_added
        while length < min(longest, len(text)):
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
