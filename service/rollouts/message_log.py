"""The message log of one rollout: the messages of its prompt, and those that were added. No I/O.

Token ids are only appended. The prompt is held once for all rollouts of a group: a log holds only what was added to it.
A generation that was interrupted leaves a partial response at the end of the log, one without finish reason, which the
next generation continues.
"""

from array import array
from collections.abc import Iterator, Sequence
from itertools import chain

from deployments.protocols.chat import ChatTokenizer, TokenizedObservation
from deployments.protocols.generation import Generation, packed_ids
from deployments.protocols.images import image_spans
from deployments.protocols.token_columns import EXPERTS, RoutedExperts
from rollout_client.contract.messages import Message
from rollout_env import ChatMessage
from service.rollouts.episode_records import EpisodeLimits, Prompt
from service.rollouts.messages import continued, is_partial, observation_message, response_of


class MessageLog:
    """The messages and token ids of one rollout. Lengths are in tokens."""

    def __init__(self, prompt: Prompt, limits: EpisodeLimits) -> None:
        self._prompt = prompt
        self._max_seq_len = limits.max_seq_len
        self._longest_response = limits.max_new_tokens or limits.max_seq_len
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

    @property
    def turns(self) -> int:
        """How many of the messages were generated."""
        return self._prompt.turns + sum(message.generation_logprobs is not None for message in self.added)

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

    def add_observation(self, message: ChatMessage, tokens: TokenizedObservation) -> None:
        shown = observation_message(message, tokens)
        self.images += image_spans([shown], self.length)
        self.added.append(shown)
        self._added_ids.extend(tokens.token_ids)

    def set_reward(self, reward: float) -> None:
        """Notes the reward of the response at the end."""
        self.added[-1] = self.added[-1].model_copy(update={"reward": reward})

    def replace(self, messages: Sequence[Message]) -> None:
        """Takes these messages as the ones after the prompt's; a response that the prompt ends with is among them."""
        posted = 0 if self._prompt.response is None else len(self._prompt.response.token_ids)
        self.added = list(messages)
        self._added_ids = packed_ids(chain.from_iterable(message.token_ids for message in messages))[posted:]
        self.images = image_spans(self)

    def _end_full_partial(self) -> None:
        """Completes a partial response that has no room left, or all the tokens that it may have: its step is due."""
        partial = self.partial
        if partial is not None and (len(partial.token_ids) >= self._longest_response or self.room <= 0):
            self.added[-1] = partial.model_copy(update={"finish_reason": "length"})
