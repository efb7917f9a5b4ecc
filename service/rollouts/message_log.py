"""The message log of one rollout: the messages of its prompt, and those that were added. No I/O.

Token ids are only appended, until the log is left for a rendering of its messages, with which another one begins: then
the messages at the beginning whose ids are the same in both stay as they are, and all others are as in a prompt.

The prompt is held once for all rollouts of a group: a log holds only what was added to it.
A generation that was interrupted leaves a partial response at the end of the log, one without finish reason, which the
next generation continues.
"""

from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate, chain, pairwise, takewhile
from sys import maxsize
from typing import Any

from pydantic_core import from_json

from deployments.failures import PromptRejected
from deployments.protocols.chat import ChatOptions, ChatTokenizer, TokenizedObservation, chat_message, fields_of
from deployments.protocols.generation import Generation, packed_ids
from deployments.protocols.images import ImageSpan, image_spans
from deployments.protocols.token_columns import EXPERTS, RoutedExperts
from rollout_client.contract.messages import ImagePart, MediaRange, Message, PromptMessage, TextPart
from rollout_env import ChatMessage
from service.rollouts.episode_records import EpisodeLimits, Prompt
from service.rollouts.messages import continued, is_partial, observation_message, response_of

Observed = Sequence[TokenizedObservation] | tuple[Message, ...]
"""An observation to append; or another log to begin, of the messages so far and the observation."""


class MessageLog:
    """The messages and token ids of one rollout. Lengths are in tokens."""

    def __init__(self, prompt: Prompt, limits: EpisodeLimits) -> None:
        self._prompt = prompt
        self._max_seq_len = limits.max_seq_len
        self._longest_response = limits.max_new_tokens or limits.max_seq_len
        self.left = [*prompt.left]
        """The logs that the rollout has left, the oldest first."""
        self.added: list[Message] = [] if prompt.response is None else [prompt.response]
        """The messages after those of the prompt. A response at the end of the prompt is one, because it changes."""
        self._added_ids = packed_ids(())
        self.images = prompt.images
        """Where the images are among the tokens."""
        self.experts = RoutedExperts(self)
        """Those that are known, from the first token of the prompt on."""
        self._end_full_partial()

    def __iter__(self) -> Iterator[Message]:
        return chain(self._prompt.messages, self.added)

    @property
    def first_added(self) -> int:
        """Index in the whole log of the first message of `added`."""
        return len(self._prompt.messages)

    @property
    def last(self) -> Message | None:
        """The last message that was added."""
        return self.added[-1] if self.added else None

    @property
    def unstepped(self) -> Message | None:
        """The complete response at the end of the log, which the environment has not judged yet."""
        last = self.last
        return last if last and last.finish_reason is not None and last.generation_logprobs is not None else None

    @property
    def partial(self) -> Message | None:
        """The response at the end of the log, if its generation was interrupted."""
        last = self.last
        return last if last and is_partial(last) else None

    @property
    def token_ids(self) -> "array[int]":
        """All token ids. While nothing was added, the prompt's own object: nobody changes it."""
        return self._prompt.token_ids + self._added_ids if self._added_ids else self._prompt.token_ids

    @property
    def length(self) -> int:
        return len(self._prompt.token_ids) + len(self._added_ids)

    @property
    def room(self) -> int:
        """How many tokens can be added."""
        return self._max_seq_len - self.length

    def last_token_ids(self, count: int) -> Sequence[int]:
        """At least the last `count` token ids."""
        return self._prompt.token_ids[-count:] + self._added_ids[-count:]

    def add_response(self, generation: Generation, tokenizer: ChatTokenizer) -> None:
        """Appends the generation, or continues the partial response with it. Changes nothing if it raises.

        Raises `GenerationRejected` if its routed experts do not go with those of the posted log.
        """
        partial = self.partial
        response = response_of(generation, tokenizer) if partial is None else continued(partial, generation, tokenizer)
        if (experts := generation.columns.get(EXPERTS)) is not None:
            self.experts.add(experts)
        self.added[len(self.added) - (partial is not None) :] = [response]
        self._added_ids.extend(generation.token_ids)
        self._end_full_partial()

    def add_observed(self, messages: Sequence[ChatMessage], observed: Observed) -> int:
        """Adds an observation, and returns how many tokens it has got."""
        if isinstance(observed, tuple):
            self.replace(observed, is_whole=True)
            return sum(len(message.token_ids) for message in observed[-len(messages) :])
        # Messages that had no room left are not among those that were tokenized.
        for message, tokens in zip(messages, observed, strict=False):
            shown = observation_message(message, tokens)
            self.images += image_spans([shown], self.length)
            self.added.append(shown)
            self._added_ids.extend(tokens.token_ids)
        return sum(len(tokens.token_ids) for tokens in observed)

    def set_reward(self, reward: float) -> None:
        """Notes the reward of the response at the end."""
        self.added[-1] = self.added[-1].model_copy(update={"reward": reward})

    def rendered(self, seen: Sequence[ChatMessage], chat: ChatOptions, tokenizer: ChatTokenizer) -> tuple[Message, ...]:
        """The messages and what is seen after them as the template renders all; none if that extends the log, or is too
        long. At the beginning, messages that have the same ids in both stay as they are.

        Raises `PromptRejected`, for messages that the template refuses.
        """
        said, log, options = [*map(_as_said, self), *seen], self.token_ids, replace(chat, echoes_answers=True)
        given, own = self._prompt.given, said[len(self._prompt.given) :]
        try:
            parts = tokenizer.prompt([*given, *(_posted(one, _with_object) for one in own)], options, maxsize)
        except PromptRejected:
            # Few templates take arguments as text.
            parts = tokenizer.prompt([*given, *map(_posted, own)], options, maxsize)
        ids = packed_ids(chain.from_iterable(part.token_ids for part in parts))
        if len(ids) >= self._max_seq_len or tokenizer.extends(ids, log):
            return ()
        ends = [*accumulate((len(message.token_ids) for message in self), initial=0)]
        kept = sum(1 for _ in takewhile(lambda part: log[slice(*part)] == ids[slice(*part)], pairwise(ends)))
        cuts = [max(end, ends[kept]) for end in accumulate(len(part.token_ids) for part in parts)]
        messages = [*self][:kept]
        for one, (begin, end) in zip(said[kept:], pairwise([ends[kept], *cuts[kept:]]), strict=True):
            images = [_range_of(image, begin) for image in image_spans(parts) if begin <= image.start < end]
            messages.append(Message.model_construct(**fields_of(one, ids[begin:end], images)))
        return tuple(messages)

    def replace(self, messages: Sequence[Message], is_whole: bool = False) -> None:
        """Takes these messages as the ones after the prompt's; a response that the prompt ends with is among them.

        Args:
            is_whole: whether those of the prompt are among them too.
        """
        if is_whole:
            self._prompt = replace(self._prompt, messages=(), response=None, token_ids=packed_ids(()))
        posted = 0 if self._prompt.response is None else len(self._prompt.response.token_ids)
        self.added = list(messages)
        self._added_ids = packed_ids(chain.from_iterable(message.token_ids for message in messages))[posted:]
        self.images = image_spans(self)

    def _end_full_partial(self) -> None:
        """Completes a partial response that has no room left, or all the tokens that it may have: its step is due."""
        partial = self.partial
        if partial is not None and (len(partial.token_ids) >= self._longest_response or self.room <= 0):
            self.added[-1] = partial.model_copy(update={"finish_reason": "length"})


def _as_said(message: Message) -> ChatMessage:
    """The message without its numbers. A response that has calls or reasoning is told by its `parsed_content`."""
    chat = chat_message(message)
    if message.generation_logprobs is not None and (message.tool_calls or message.reasoning_content):
        chat.setdefault("parsed_content", "")
    return chat


def _posted(said: ChatMessage, call_of: Callable[[Any], Any] = lambda call: call) -> PromptMessage:
    """The message as a template takes it: images before the text, and of a response what was parsed.

    Parsers leave the empty lines around it, which a template writes itself.
    """
    fields: dict[str, Any] = {**said}
    text = said["parsed_content"].strip("\n") if "parsed_content" in said else said["content"]
    images = [ImagePart.model_construct(type="image", image=str(name)) for name in said.get("images", ())]
    fields["content"] = [*images, *([TextPart(type="text", text=text)] if text else [])] if images else text
    if calls := said.get("tool_calls"):
        fields["tool_calls"] = [*map(call_of, calls)]
    return PromptMessage.model_construct(**fields)


def _with_object(call: Any) -> Any:
    """The call with its arguments as an object, as most templates take them, if they are the JSON text of one."""
    with suppress(KeyError, TypeError, ValueError):
        return {**call, "function": {**call["function"], "arguments": {**from_json(call["function"]["arguments"])}}}
    return call


def _range_of(image: ImageSpan, begin: int) -> MediaRange:
    return MediaRange(media=image.name, start=image.start - begin, end=image.end - begin)
