"""The messages that an episode adds to its log: responses and observations, and the tokens of their images.

A response is made from one generation, or from the parts of one that was interrupted, and has what was parsed out of
it. An observation has the tokens that it got.

How much of a response that goes on can stay, so that no stop string is missed across the cut: of an interrupted
generation, and of a partial response that a fork leaves or a caller posts (`_closed_length`). The engine looks for stop
strings only in the text of one generation. One that begins before the cut and ends after it would be missed. So tokens
at the end are dropped, and generated again, as long as the text ends with what could be the beginning of a stop string.
Proof that the rest finds what an uncut generation finds: let T be the text that stays. No end of T is the beginning of
a stop string, so no occurrence begins in T and ends after it. T holds no whole occurrence either: the engine would have
ended the generation there. Hence every occurrence begins after T, where the next generation sees all of it.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import accumulate, chain
from typing import Any

from deployments.protocols.chat import CONTEXT_TOKENS, ChatTokenizer, ParsedResponse, TokenizedObservation, fields_of
from deployments.protocols.generation import Generation, Generator, packed_ids, packed_logprobs
from deployments.protocols.images import ImageTokens
from deployments.protocols.token_columns import EXPERTS, first_rows, joined_columns, rows_between
from deployments.protocols.weight_versions import joined_spans
from deployments.rpc.background_tasks import SharedCalls
from rollout_client.contract.base import set_fields
from rollout_client.contract.messages import COLUMN_FIELDS, Message, WeightVersionSpan
from rollout_env import ChatMessage

HOW_SAMPLED = frozenset({"constrained", "sampled_with"})
"""Fields of a message that are as true of a part of it."""
FIRST_WINDOW = 16
"""Tokens at the end that are searched first; four times as many each time that all of them would have to go."""
OF_WHOLE = frozenset({"reward", "tool_calls", "reasoning_content", "parsed_content", "parse_error"})
"""Fields of a response that are of all of its tokens together."""
Pieces = Sequence[str | None]


def _tokens_to_keep(length: int, stop_strings: Sequence[str], pieces_from: Callable[[int], Pieces]) -> int:
    """How many of the first tokens of an interrupted generation can stay.

    Args:
        length: the number of its tokens.
        pieces_from: the text that each token from this index on adds; see `ChatTokenizer.pieces`.
    """
    if not stop_strings:
        return length
    window = FIRST_WINDOW
    while window < length:
        first = length - window
        # A match that begins before the window is invisible here, but none is longer than this.
        hidden = max(map(len, stop_strings)) - 1
        if (kept := _last_closed_end(pieces_from(first), stop_strings, hidden)) is not None:
            return first + kept
        window *= 4
    return _last_closed_end(pieces_from(0), stop_strings, hidden=0) or 0


def _last_closed_end(pieces: Pieces, stop_strings: Sequence[str], hidden: int) -> int | None:
    """The highest number of first pieces after which no beginning of a stop string is open, and no character.

    Ends within the first `hidden` characters do not count. `None` if there is no such end but that of no piece.
    """
    text = "".join(piece or "" for piece in pieces)
    are_open = [_open_ends(text, stop_string) for stop_string in stop_strings]
    ends = list(accumulate((len(piece or "") for piece in pieces), initial=0))
    for kept in range(len(pieces), 0, -1):
        end = ends[kept]
        is_whole = pieces[kept - 1] is not None
        if is_whole and end >= hidden and not any(is_open[end] for is_open in are_open):
            return kept
    return None


def _open_ends(text: str, stop_string: str) -> list[bool]:
    """Whether `text[:i]` ends with a beginning of the stop string that is not all of it, for each i from 0 on.

    The algorithm of Knuth, Morris and Pratt: linear in both lengths, because callers choose both.
    """
    size, matched = len(stop_string), [0]
    # `None` is no character: no match goes on from the stop string into the text.
    for character in (*stop_string[1:], None, *text):
        length = matched[-1]
        while length and (length == size or stop_string[length] != character):
            length = matched[length - 1]
        matched.append(length + (stop_string[length] == character))
    return [0 < length < size or (length == size and matched[size - 1] > 0) for length in matched[size:]]


def response_of(generation: Generation, tokenizer: ChatTokenizer) -> Message:
    """The message of a generation. Its `finish_reason` is null if the generation was interrupted."""
    return Message.model_construct(
        role="assistant",
        content=tokenizer.decode(generation.token_ids),
        token_ids=generation.token_ids,
        generation_logprobs=generation.logprobs,
        finish_reason=None if generation.finish_reason == "abort" else generation.finish_reason,
        weight_versions=[_version_span(span.version, span.start, span.end) for span in generation.weight_versions],
        **_own_columns(generation),
    )


def _own_columns(generation: Generation) -> dict[str, Any]:
    """The columns of its message. Those of routed experts begin before it, and are the log's."""
    return {name: column for name, column in generation.columns.items() if name != EXPERTS}


def continued(partial: Message, part: Generation, tokenizer: ChatTokenizer) -> Message:
    """The partial response with the tokens of a further generation, as if one generation had made all of them."""
    there = len(partial.token_ids)
    token_ids = packed_ids(chain(partial.token_ids, part.token_ids))
    added: dict[str, Any] = {
        "content": tokenizer.decode(token_ids),
        "token_ids": token_ids,
        "generation_logprobs": packed_logprobs(chain(partial.generation_logprobs or (), part.logprobs)),
        "finish_reason": None if part.finish_reason == "abort" else part.finish_reason,
        "weight_versions": joined_spans(partial.weight_versions or (), part.weight_versions, there, _version_span),
    }
    columns = {name: getattr(partial, name) for name in COLUMN_FIELDS & partial.model_fields_set - {EXPERTS}}
    # A column has a row for each token: one that did not go on would be misread.
    joined = dict.fromkeys(columns) | joined_columns(columns, _own_columns(part))
    return partial.model_copy(update=added | joined)


def _version_span(version: str, start: int, end: int) -> WeightVersionSpan:
    return WeightVersionSpan.model_construct(version=version, start=start, end=end)


def _closed_length(
    token_ids: Sequence[int], before: Sequence[int], stop_strings: Sequence[str], tokenizer: ChatTokenizer
) -> int:
    """How many of the first tokens of a response that goes on can stay: those after them could begin a stop string.

    Args:
        before: the token ids before the response, at least the last `CONTEXT_TOKENS`.
    """

    def pieces_from(first: int) -> list[str | None]:
        context = [*before[-CONTEXT_TOKENS:], *token_ids[max(first - CONTEXT_TOKENS, 0) : first]]
        return tokenizer.pieces(token_ids[first:], context[-CONTEXT_TOKENS:])

    return _tokens_to_keep(len(token_ids), stop_strings, pieces_from)


def without_open_stop_string(
    interrupted: Generation, before: Sequence[int], stop_strings: Sequence[str], tokenizer: ChatTokenizer
) -> Generation:
    """The interrupted generation without the tokens that `_closed_length` leaves out."""
    kept = _closed_length(interrupted.token_ids, before, stop_strings, tokenizer)
    return interrupted if kept == len(interrupted.token_ids) else first_tokens(interrupted, kept)


def log_without_open_stop_string(
    message_log: Sequence[Message], stop_strings: Sequence[str], tokenizer: ChatTokenizer
) -> Sequence[Message]:
    """The log without the tokens of a partial response at its end that `_closed_length` leaves out.

    A partial response of which nothing stays leaves the log.
    """
    if not (message_log and is_partial(message_log[-1])):
        return message_log
    *messages, partial = message_log
    before = [token_id for message in messages[-CONTEXT_TOKENS:] for token_id in message.token_ids[-CONTEXT_TOKENS:]]
    kept = _closed_length(partial.token_ids, before, stop_strings, tokenizer)
    if kept == len(partial.token_ids):
        return message_log
    return [*messages, first_tokens_of(partial, kept, tokenizer)] if kept else messages


def is_partial(message: Message) -> bool:
    """Whether the message is a response whose generation was interrupted."""
    return message.finish_reason is None and message.generation_logprobs is not None


def first_tokens(generation: Generation, count: int) -> Generation:
    """The generation, interrupted after its first `count` tokens."""
    return replace(
        generation,
        token_ids=generation.token_ids[:count],
        logprobs=generation.logprobs[:count],
        finish_reason="abort",
        weight_versions=tuple(
            replace(span, end=min(span.end, count)) for span in generation.weight_versions if span.start < count
        ),
        columns=first_rows(generation.columns, count, len(generation.token_ids)),
    )


def first_tokens_of(response: Message, count: int, tokenizer: ChatTokenizer) -> Message:
    """The response as if its generation had been interrupted after its first `count` tokens, fewer than it has."""
    token_ids = packed_ids(response.token_ids[:count])
    fields = {name: value for name, value in set_fields(response).items() if name not in OF_WHOLE | COLUMN_FIELDS}
    columns = {name: getattr(response, name) for name in COLUMN_FIELDS & response.model_fields_set}
    columns = {name: column for name, column in columns.items() if column is not None}
    # Those of routed experts are the message's own here, and the last tokens of a log have none.
    experts = columns.pop(EXPERTS, None)
    kept: dict[str, Any] = {**first_rows(columns, count, len(response.token_ids))}
    kept |= {name: getattr(response, name) for name in HOW_SAMPLED & response.model_fields_set}
    if experts is not None:
        kept[EXPERTS] = rows_between(experts, 0, min(count, experts.shape[0]))
    if (spans := response.weight_versions) is not None:
        kept["weight_versions"] = [
            _version_span(span.version, span.start, min(span.end, count)) for span in spans if span.start < count
        ]
    kept["content"] = tokenizer.decode(token_ids)
    kept["token_ids"] = token_ids
    kept["generation_logprobs"] = (response.generation_logprobs or [])[:count]
    return Message.model_construct(**fields | kept | {"finish_reason": None})


def with_parsed(response: Message, parsed: ParsedResponse) -> Message:
    """The response with its parsed parts. Text and tokens stay as they are."""
    found = {
        "tool_calls": parsed.tool_calls or None,
        "reasoning_content": parsed.reasoning_content,
        "parsed_content": parsed.parsed_content,
        "parse_error": parsed.parse_error,
    }
    return response.model_copy(update={name: value for name, value in found.items() if value is not None})


def was_parsed(response: Message) -> bool:
    """Whether the response was parsed, also if that failed."""
    return not (response.tool_calls is None and response.reasoning_content is None and response.parse_error is None)


def observation_message(message: ChatMessage, tokens: TokenizedObservation) -> Message:
    """The message with the tokens that it got, and the text that they cover."""
    fields = fields_of(message, packed_ids(tokens.token_ids), tokens.mm_ranges)
    return Message.model_construct(**fields | {"content": tokens.content})


MOST_KNOWN = 2**14
"""An image has some hundred to some thousand tokens, of 4 bytes each."""


class ImageReader:
    """Asks an engine once for the tokens of each image. All requests of an event loop share it."""

    def __init__(self, generator: Generator, most_known: int = MOST_KNOWN) -> None:
        self._generator = generator
        self._most_known = most_known
        self._known: OrderedDict[str, ImageTokens] = OrderedDict()
        self._asked = SharedCalls(self._ask)

    async def learn(self, names: Iterable[str], into: dict[str, ImageTokens]) -> None:
        """Adds the tokens of these images to `into`, where they are missing. Raises what `image_tokens` raises."""
        missing = [name for name in dict.fromkeys(names) if name not in into]
        into.update(zip(missing, await asyncio.gather(*map(self._tokens, missing)), strict=True))

    async def _tokens(self, name: str) -> ImageTokens:
        if (known := self._known.get(name)) is not None:
            self._known.move_to_end(name)
            return known
        return await self._asked.result(name)

    async def _ask(self, name: str) -> ImageTokens:
        [tokens] = await self._generator.image_tokens([name])
        self._known[name] = tokens
        if len(self._known) > self._most_known:
            self._known.popitem(last=False)
        return tokens
