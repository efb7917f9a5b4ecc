"""Responses in a message log: made from one generation, or from the parts of one that was interrupted. No I/O."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from deployments.protocols.chat import CONTEXT_TOKENS, ChatTokenizer
from deployments.protocols.generation import Generation, packed_ids, packed_logprobs
from deployments.protocols.weight_versions import joined_spans
from rollout_client.contract import Message, WeightVersionSpan
from service.rollouts.stop_strings import tokens_to_keep


def response_of(generation: Generation, tokenizer: ChatTokenizer) -> Message:
    """The message of a generation. Its `finish_reason` is null if the generation was interrupted."""
    return Message.model_construct(
        role="assistant",
        content=tokenizer.decode(generation.token_ids),
        token_ids=generation.token_ids,
        generation_logprobs=generation.logprobs,
        finish_reason=None if generation.finish_reason == "abort" else generation.finish_reason,
        weight_versions=[version_span(span.version, span.start, span.end) for span in generation.weight_versions],
    )


def continued(partial: Message, part: Generation, tokenizer: ChatTokenizer) -> Message:
    """The partial response with the tokens of a further generation, as if one generation had made all of them."""
    there = len(partial.token_ids)
    token_ids = packed_ids(chain(partial.token_ids, part.token_ids))
    added = {
        "content": tokenizer.decode(token_ids),
        "token_ids": token_ids,
        "generation_logprobs": packed_logprobs(chain(partial.generation_logprobs or (), part.logprobs)),
        "finish_reason": None if part.finish_reason == "abort" else part.finish_reason,
        "weight_versions": joined_spans(partial.weight_versions or (), part.weight_versions, there, version_span),
    }
    return partial.model_copy(update=added)


def version_span(version: str, start: int, end: int) -> WeightVersionSpan:
    return WeightVersionSpan.model_construct(version=version, start=start, end=end)


def without_open_stop_string(
    interrupted: Generation, before: Sequence[int], stop_strings: Sequence[str], tokenizer: ChatTokenizer
) -> Generation:
    """The interrupted generation without the tokens at its end that could be the beginning of a stop string.

    Args:
        before: the token ids before the generation.
    """
    token_ids = interrupted.token_ids

    def pieces_from(first: int) -> list[str | None]:
        context = [*before[-CONTEXT_TOKENS:], *token_ids[max(first - CONTEXT_TOKENS, 0) : first]]
        return tokenizer.pieces(token_ids[first:], context[-CONTEXT_TOKENS:])

    kept = tokens_to_keep(len(token_ids), stop_strings, pieces_from)
    return interrupted if kept == len(token_ids) else first_tokens(interrupted, kept)


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
    )
