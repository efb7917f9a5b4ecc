"""Text to tokens and back. A prompt is rendered once; afterwards its tokens are only appended to."""

from bisect import bisect_left, bisect_right
from collections.abc import Container, Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any
from unicodedata import normalize

from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerFast

from deployments.chat.bridge import PROBE_ANSWER, PROBE_QUESTION, Bridge, Bridges
from deployments.chat.chat_template import RENDERING_ERRORS, Chat, ChatTemplate
from deployments.chat.text_encoder import SplittableText, TextEncoder, TokenizedText
from deployments.chat.tokenizer_loading import end_tokens_of, load_tokenizer, refuse_lossy, refuse_slow
from deployments.failures import EnvironmentRejected, PromptRejected
from deployments.protocols.chat import (
    FROM_MAIN,
    ChatOptions,
    ChatTokenizer,
    FromHub,
    SplitSpecialTokens,
    TokenizedObservation,
    UnsupportedTokenizer,
    images_of,
    images_shown,
    prompt_message,
)
from deployments.protocols.images import ImagesByName, OtherPlaceholders, expanded
from rollout_client.contract.info import TokenizerInfo
from rollout_client.contract.messages import Message, PromptMessage
from rollout_client.tokenizer_check import tokenizer_info, tokens_by_id
from rollout_env import ChatMessage

PLAIN = ChatOptions()
MOST_OVERLAP = 64
"""More tokens than a chat template puts before the content of a message."""


class TransformersChatTokenizer(ChatTokenizer):
    """The model's own tokenizer and chat template. Holds no state of a rollout; threads may share it."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        skip_special_tokens: bool = True,
        further_ends_of_turn: Iterable[int] = (),
        split_special_tokens: SplitSpecialTokens = "observations",
    ) -> None:
        """Takes the parts of a model's chat format.

        Args:
            skip_special_tokens: whether the text of a response is without them.
            further_ends_of_turn: tokens that end a response, beside those that tokenizer and template name.
            split_special_tokens: whose texts are data, in which control tokens are ordinary text.

        Raises:
            UnsupportedTokenizer: the tokenizer is not fast, or its template does not frame an observation.
        """
        refuse_slow(tokenizer)
        if tokenizer.chat_template is None:
            raise UnsupportedTokenizer("The tokenizer has no chat template: give the model one (chat_template.jinja).")
        self._tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer)
        self._encoder = TextEncoder(tokenizer)
        # Special tokens without a name (eos_token, ...) can end a turn as well.
        self._special_ids = {id_ for id_, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._special_ids.update(tokenizer.all_special_ids)
        self._bridges = Bridges(self._template)
        self._skip_special_tokens = skip_special_tokens
        self._split = split_special_tokens
        known_ends = {token_id for token_id in (tokenizer.eos_token_id, *further_ends_of_turn) if token_id is not None}
        self._closing, self._ends_turns = self._closing_of_template(known_ends)
        self.ends_of_turn = frozenset({*known_ends, *self._closing[-1:]})
        """Tokens that end a response and are no part of its text."""
        self._bridges.end_tokens = tokenizer.convert_ids_to_tokens(sorted(self.ends_of_turn))

    @cached_property
    def info(self) -> TokenizerInfo:
        return tokenizer_info(self._tokenizer)

    @cached_property
    def vocabulary(self) -> list[str | None]:
        """The token of each id."""
        return tokens_by_id(self._tokenizer)

    def prepare_info(self) -> None:
        """Computes `info` and `vocabulary`, which takes tenths of a second for a large vocabulary."""
        _ = self.info, self.vocabulary

    @classmethod
    def load(
        cls,
        name_or_path: str,
        model: str | None = None,
        skip_special_tokens: bool = True,
        split_special_tokens: SplitSpecialTokens = "observations",
        hub: FromHub = FROM_MAIN,
    ) -> "TransformersChatTokenizer":
        """Loads the tokenizer, and checks that plain text comes back from its ids.

        Args:
            model: has further end tokens in its generation config, if it has one; by default `name_or_path`.
            hub: how both are loaded from the Hub.

        Raises:
            UnsupportedTokenizer: see `load_tokenizer`, `refuse_lossy` and the constructor.
        """
        ends = end_tokens_of(model or name_or_path, hub.revision)
        tokenizer = load_tokenizer(name_or_path, hub)
        refuse_lossy(tokenizer)
        return cls(tokenizer, skip_special_tokens, ends, split_special_tokens)

    def prompt(self, messages: Sequence[PromptMessage], options: ChatOptions, max_tokens: int) -> list[Message]:
        """The messages with their parts of `prompt_ids`, whose errors it raises, and the tokens of their images."""
        ids = self.prompt_ids([message.model_dump(exclude_unset=True) for message in messages], options, max_tokens)
        prompt = []
        for place, (message, part) in enumerate(zip(messages, ids, strict=True)):
            try:
                prompt.append(prompt_message(message, *expanded(part, images_of(message), options.images)))
            except OtherPlaceholders as error:
                raise PromptRejected(
                    f"{error} in message {place}, of role {message.role!r}: show images in messages of another role, "
                    "and leave out text that spells one."
                ) from error
        return prompt

    def prompt_ids(self, chat: Chat, options: ChatOptions, max_tokens: int) -> list[list[int]]:
        """Renders chat messages up to the generation prompt and tokenizes them.

        The concatenated ids are the tokenized rendering of the whole prompt, in which control tokens that data spell
        are ordinary text. Each message gets the ids of its own part, the last one also those of the generation prompt.

        Raises:
            PromptRejected: the template refuses the messages or moves the tools, or they have more than `max_tokens`
                tokens.
        """
        control_tokens = self._encoder.control_tokens
        split = "all" if options.has_observations and self._split == "observations" else self._split
        chat = control_tokens.hidden_in_prompt(chat, split, options.echoes_answers)
        options = replace(options, tools=control_tokens.hidden_in_tools(options.tools, self._split))
        try:
            chat = self._template.with_contents(chat, options)
            rendered = self._template.render(chat, options)
            text = control_tokens.restored(rendered)
            self._refuse_moved_tools(options)
            ends = map(text.index, self._template.cuts(chat, rendered, options))
            encoding = self._encoder.encode(text)
            refuse_too_many(len(encoding), max_tokens)
            # The whole list of offsets would hold the interpreter's lock for longer than the tokenizer takes.
            places = range(len(encoding))
            cuts = [0, *(bisect_left(places, end, key=encoding.start_of) for end in ends), len(encoding)]
        except RENDERING_ERRORS as error:
            raise PromptRejected(f"The model's chat template refuses the messages: {error}") from error
        return [encoding.ids[start:end] for start, end in pairwise(cuts)]

    def generation_prompt(self, options: ChatOptions) -> list[int]:
        """The ids that the template puts after the last message to begin a response."""
        without = self._encoder.encode(self._template.render([PROBE_QUESTION], options, False)).ids
        ids: list[int] = self._encoder.encode(self._template.render([PROBE_QUESTION], options)).ids
        # Some templates end the text with a token of their own where no response begins.
        return ids[_common_length(ids, without) :]

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a response: without special tokens, or at least without the one that ends its turn."""
        if self._skip_special_tokens:
            return self._encoder.decode(token_ids)
        ends = len(token_ids) > 0 and token_ids[-1] in self.ends_of_turn
        return self._encoder.decode(token_ids[:-1] if ends else token_ids, skip_special_tokens=False)

    def extends(self, rendered: Sequence[int], log: Sequence[int]) -> bool:
        """See `ChatTokenizer.extends`. The ids of a text differ where a model has not sampled the tokenizer's."""
        spoken = ([one for one in ids if one not in self.ends_of_turn] for ids in (rendered, log))
        whole, begin = ("".join(normalize("NFC", self._encoder.decode(ids, False)).split()) for ids in spoken)
        return whole.startswith(begin)

    def pieces(self, token_ids: Sequence[int], before: Sequence[int]) -> list[str | None]:
        """The text that each token adds after the ids `before`, as vLLM reads it when it looks for stop strings."""
        stream = DecodeStream(ids=list(before), skip_special_tokens=True)
        pieces: list[str | None] = []
        for token_id in token_ids:
            piece = stream.step(self._tokenizer.backend_tokenizer, token_id)
            is_skipped = token_id in self._special_ids and (not pieces or pieces[-1] is not None)
            pieces.append("" if piece is None and is_skipped else piece)
        return pieces

    def observations(
        self, messages: Sequence[ChatMessage], after: Sequence[int], options: ChatOptions, room: int, calls: Chat = ()
    ) -> list[TokenizedObservation]:
        """Tokenizes the messages of an observation that follow the generated ids `after`, which made `calls`.

        They are rendered together, and the first `room` ids are kept. Of messages that have none of these, only the
        first is in the result, without text. `raw` is the text alone. `chat` is what the template puts between the
        response and the next generation prompt, without the end of turn that the response already has. A response that
        ended with another end token than the template's, as a base model's `<|endoftext|>`, has ended its turn too.

        Images come before the text of their message. One that has no room for all of its tokens is left out, with what
        follows.

        Raises:
            EnvironmentRejected: the template refuses a message's role, or drops what the message says or shows.
        """
        observed = self._observations(messages, after, options, room, calls)
        names = [images_shown([message]) for message in messages]
        if not any(names):
            return observed
        fitting = _tokens_that_fit(observed, names, options.images, room)
        if fitting < sum(len(message.token_ids) for message in observed):
            observed = self._observations(messages, after, options, fitting, calls)
        try:
            return [
                _with_images(message, shown, options.images) for message, shown in zip(observed, names, strict=False)
            ]
        except OtherPlaceholders as error:
            raise EnvironmentRejected(f"{error} of an observation: show images in messages of another role.") from error

    def _observations(
        self, messages: Sequence[ChatMessage], after: Sequence[int], options: ChatOptions, room: int, calls: Chat
    ) -> list[TokenizedObservation]:
        """As `observations`; each image is still its placeholder."""
        control_tokens = self._encoder.control_tokens
        hidden: Any = control_tokens.hidden_in_observation(messages, self._split, options.echoes_answers)
        answered = control_tokens.hidden_in_observation(calls, self._split)
        try:
            bridge = self._framed(hidden, answered, options)
        except UnsupportedTokenizer as error:
            raise EnvironmentRejected(str(error)) from error
        text = control_tokens.restored(bridge.text)
        kept = max(room, 0)
        encoding = self._encoder.encode_beginning(text, kept + MOST_OVERLAP)
        ids, overlap = encoding.ids, 0
        if options.observation_format == "chat":
            overlap = self._end_of_turn_overlap(after, ids)
        places = range(len(ids))
        ends = map(text.index, bridge.ends)
        cuts = [overlap, *(max(bisect_left(places, end, key=encoding.start_of), overlap) for end in ends), len(ids)]
        if len(ids) <= overlap + room:
            return [
                TokenizedObservation(ids[first:last], message["content"], was_cut=False)
                for message, (first, last) in zip(messages, pairwise(cuts), strict=True)
            ]
        end = _covered_end(encoding, text.text, overlap + kept) if kept > 0 else 0
        whole = sum(cut <= overlap + kept for cut in cuts[1:])
        observed = [
            TokenizedObservation(ids[first:last], message["content"], was_cut=True)
            for message, (first, last) in zip(messages[:whole], pairwise(cuts), strict=False)
        ]
        first = cuts[whole]
        if first < overlap + kept or not observed:
            covered = self._covered(messages[whole]["content"], hidden[: whole + 1], answered, text, end, options)
            observed.append(TokenizedObservation(ids[first : overlap + kept], covered, was_cut=True))
        return observed

    def _framed(self, messages: Sequence[ChatMessage], calls: Chat, options: ChatOptions) -> Bridge:
        """Raises `UnsupportedTokenizer` if the template refuses or drops a message."""
        if options.observation_format == "raw":
            if images_shown(messages):
                raise UnsupportedTokenizer(
                    "The observation shows an image, and observation_format 'raw' has no place for it: send "
                    "observation_format 'chat' with the sample."
                )
            contents = [message["content"] for message in messages]
            return Bridge("".join(contents), list(accumulate(map(len, contents[:-1]))))
        return self._bridges.bridge(messages, calls, options)

    def _end_of_turn_overlap(self, response: Sequence[int], bridge: list[int]) -> int:
        """How many tokens of the bridge the response already has: the end of its turn, as far as it got."""
        for length in range(min(len(response), len(bridge), MOST_OVERLAP), 0, -1):
            if bridge[length - 1] in self._special_ids and bridge[:length] == [*response[-length:]]:
                return length
        is_ended = len(response) > 0 and response[-1] in self.ends_of_turn
        closes_turn = self._ends_turns and bridge[: len(self._closing)] == self._closing
        return len(self._closing) if is_ended and closes_turn else 0

    def _closing_of_template(self, known_ends: Container[int]) -> tuple[list[int], bool]:
        """The tokens with which the template's bridges begin, up to the one that ends a turn; and whether one does.

        Families that end no turn (GLM) begin the next message there. Their models end a response with that token.
        """
        bridge: list[int] = self._encoder.encode(self._bridges.bridge([PROBE_QUESTION], (), PLAIN).text).ids
        end: list[int] = self._encoder.encode(self._bridges.end_of_answer()).ids
        places = [place for place, token_id in enumerate(bridge) if token_id in self._special_ids]
        # The template writes these also where nothing follows. Some begin a response there all the same.
        ending = [place for place in places if place < _common_length(bridge, end)]
        known = [place for place in ending if bridge[place] in known_ends]
        last = next((each for each in (known[-1:], ending[-1:], places[:1]) if each), [-1])[0]
        return bridge[: last + 1], not self._special_ids.isdisjoint(end)

    def _covered(
        self, content: str, hidden: Chat, calls: Chat, text: SplittableText, end: int, options: ChatOptions
    ) -> str:
        """The part of the last message's content that is in the first `end` characters of `text`.

        Args:
            hidden: the messages as the template gets them.
        """
        if options.observation_format == "raw":
            start = text.index(sum(len(message["content"]) for message in hidden[:-1]))
            return content[: max(end - start, 0)]

        def content_end(length: int) -> int:
            last: Any = {**hidden[-1], "content": content[:length]}
            beginning = self._encoder.control_tokens.hidden_in_observation([last], self._split, options.echoes_answers)
            return text.index(self._bridges.content_end([*hidden[:-1], *beginning], calls, options))

        start = content_end(0)
        # A template may strip the content that it frames.
        for shown in (content, content.strip()):
            if text.text.startswith(shown, start):
                return shown[: max(end - start, 0)]
        # Or write it as JSON, where some characters become several.
        return content[: max(bisect_right(range(len(content) + 1), end, key=content_end) - 1, 0)]

    def _refuse_moved_tools(self, options: ChatOptions) -> None:
        """Raises `PromptRejected` if the template writes the tools into the last message instead of the first."""
        if options.tools is None:
            return
        first = self._template.render([PROBE_QUESTION], options)
        bare = self._template.render([PROBE_QUESTION], replace(options, tools=None))
        tools_and_before = first[: len(first) - _common_length(first[::-1], bare[::-1])]
        # Some templates find the last question by what it says: the second one says something else.
        second = {**PROBE_QUESTION, "content": "Another one"}
        if not self._template.render([PROBE_QUESTION, PROBE_ANSWER, second], options).startswith(tools_and_before):
            raise PromptRejected(
                "The model's chat template moves the tools to the last message, but tokens are only ever appended: "
                "leave tools out and describe them in a message."
            )


def _covered_end(encoding: TokenizedText, text: str, tokens: int) -> int:
    """The index in `text` at which what its first tokens cover ends; there are more."""
    end, following = encoding.end_of(tokens - 1), encoding.start_of(tokens)
    # A character is covered only when all of its bytes are: otherwise the next token begins at the same offset.
    if following <= end:
        return following
    # Of characters that a normalizer puts together, such as a letter and its accent, only the first is a token's.
    # Spaces that no token has are the next one's.
    return end if text[end].isspace() else end + len(text[end:following].split()[0])


def _common_length(one: Sequence[object], other: Sequence[object]) -> int:
    """How many elements at the beginning of both are the same."""
    both = zip(one, other, strict=False)
    return next((place for place, pair in enumerate(both) if pair[0] != pair[1]), min(len(one), len(other)))


def refuse_too_many(tokens: int, max_seq_len: int) -> None:
    """Raises `PromptRejected` for a prompt of more tokens than `max_seq_len`."""
    if tokens > max_seq_len:
        raise PromptRejected(
            f"The prompt has {tokens} tokens and max_seq_len is {max_seq_len}: shorten the prompt or raise max_seq_len."
        )


def _with_images(message: TokenizedObservation, names: Sequence[str], images: ImagesByName) -> TokenizedObservation:
    """The message with the tokens of its images. One that was cut may show the first of them alone.

    Raises `OtherPlaceholders` if the template writes more images or fewer.
    """
    if message.was_cut:
        placeholders = {images[name].placeholder for name in names}
        names = names[: sum(token_id in placeholders for token_id in message.token_ids)]
    token_ids, mm_ranges = expanded(message.token_ids, names, images)
    return replace(message, token_ids=token_ids, mm_ranges=mm_ranges)


def _tokens_that_fit(
    observed: Sequence[TokenizedObservation], names: Sequence[Sequence[str]], images: ImagesByName, room: int
) -> int:
    """How many tokens of the messages, of which each image is still one, have room with those of their images.

    An image has room as a whole or not at all.
    """
    fitting = 0
    for message, shown in zip(observed, names, strict=False):
        sizes = (len(images[name].token_ids) for name in shown)
        placeholder = images[shown[0]].placeholder if shown else None
        for token_id in message.token_ids:
            cost = next(sizes, 1) if token_id == placeholder else 1
            if cost > room:
                return fitting
            room -= cost
            fitting += 1
    return fitting
