"""Text to tokens and back, for whole conversations: rendered once, then only appended to."""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from deployments.failures import EnvironmentRejected, PromptRejected
from deployments.protocols import ChatMessage
from rollout_client.contract import Message, ObservationFormat, PromptMessage, Role

ANY_QUESTION: ChatMessage = {"role": "user", "content": "Question"}
ANY_ANSWER: ChatMessage = {"role": "assistant", "content": "Answer7f3a"}
ANY_OBSERVATION = "Observation7f3a"


class TokenizerUnfit(Exception):
    """The model's tokenizer or chat template cannot carry a conversation token-exactly."""


class ConversationTokenizer:
    """The model's own tokenizer and chat template, for one conversation after another."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        """Raises `TokenizerUnfit` unless the tokenizer is fast and its template frames an observation."""
        if not tokenizer.is_fast:
            raise TokenizerUnfit("The tokenizer has no fast version (tokenizer.json), which gives character offsets.")
        if tokenizer.chat_template is None:
            raise TokenizerUnfit("The tokenizer has no chat template: give the model one (chat_template.jinja).")
        self._tokenizer = tokenizer
        self._special_ids = frozenset(tokenizer.all_special_ids)
        self._longest_token = max(map(len, tokenizer.get_vocab()))
        self._content_start_by_role: dict[str, int] = {}
        self._content_start("user")

    @classmethod
    def load(cls, name_or_path: str) -> "ConversationTokenizer":
        local = Path(name_or_path)
        tokenizer: Any = AutoTokenizer.from_pretrained(local.resolve() if local.is_dir() else name_or_path)
        return cls(tokenizer)

    def prompt(self, messages: Sequence[PromptMessage], max_tokens: int) -> list[Message]:
        """Renders chat messages up to the generation prompt.

        The concatenated ids are the tokenized rendering of the whole; each message gets the ids of its own part, the
        last one the generation prompt too.

        Raises:
            PromptRejected: the template refuses the messages, or `max_tokens` tokens cannot carry so much text.
        """
        chat = [ChatMessage(role=message.role, content=message.content) for message in messages]
        try:
            text = self._render(chat)
            self._refuse_hopeless(text, max_tokens)
            ends = accumulate((self._end_of_prefix(text, chat[:count]) for count in range(1, len(chat))), max)
            ids, offsets = self._tokenize(text)
            cuts = [0, *(bisect_left(offsets, (end, 0)) for end in ends), len(ids)]
        except TemplateError as error:
            raise PromptRejected(f"The model's chat template refuses the messages: {error}") from error
        return [
            Message.model_construct(role=message.role, content=message.content, token_ids=ids[start:end])
            for message, start, end in zip(messages, cuts, cuts[1:], strict=False)
        ]

    def _refuse_hopeless(self, text: str, max_tokens: int) -> None:
        """Spares the tokenizer a text that is too long whatever its tokens are."""
        if len(text) > max_tokens * self._longest_token:
            raise PromptRejected(
                f"The prompt has {len(text)} characters, more than max_seq_len {max_tokens} can hold: "
                "shorten the prompt or raise max_seq_len."
            )

    def decode(self, token_ids: list[int]) -> str:
        """The text of `token_ids`, special tokens skipped."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def observation(
        self, observation: ChatMessage, after: list[int], observation_format: ObservationFormat, room: int
    ) -> tuple[list[int], str, bool]:
        """Tokenizes an observation that follows the generated ids `after`.

        `raw` is the text alone. `chat` is what the template puts between the response and the next generation prompt,
        less the end of turn that the response brought itself.

        Returns:
            its ids, at most `room` of them; the text that they cover; whether any were left out.

        Raises:
            EnvironmentRejected: the template refuses the observation's role.
        """
        content, content_start = observation["content"], 0
        framed = content
        if observation_format == "chat":
            try:
                framed, content_start = self._bridge(observation), self._content_start(observation["role"])
            except TokenizerUnfit as error:
                raise EnvironmentRejected(str(error)) from error
        ids, offsets = self._tokenize(framed)
        if after and ids and after[-1] == ids[0] and ids[0] in self._special_ids and observation_format == "chat":
            ids, offsets = ids[1:], offsets[1:]
        if len(ids) <= room:
            return ids, content, False
        # A character whose bytes are not all kept is not covered: the next token begins where it does.
        covered_end = min(offsets[room - 1][1], offsets[room][0]) if room > 0 else 0
        # A template may strip the content that it frames.
        shown = content if framed.startswith(content, content_start) else content.strip()
        return ids[: max(room, 0)], shown[: max(covered_end - content_start, 0)], True

    def _bridge(self, observation: ChatMessage) -> str:
        """What the template appends to an answer when an observation follows it, up to the next generation prompt."""
        try:
            text = self._render([ANY_QUESTION, ANY_ANSWER, observation])
        except TemplateError as error:
            raise TokenizerUnfit(
                f"The model's chat template refuses a message of role {observation['role']!r} after an answer: {error}"
            ) from error
        _, answer, bridge = text.partition(ANY_ANSWER["content"])
        if not answer:
            raise TokenizerUnfit(f"The model's chat template does not keep an answer as it is: {text!r}")
        return bridge

    def _content_start(self, role: Role) -> int:
        """Where the content of an observation of this role begins within its bridge."""
        if role not in self._content_start_by_role:
            bridge = self._bridge({"role": role, "content": ANY_OBSERVATION})
            if ANY_OBSERVATION not in bridge:
                raise TokenizerUnfit(f"The model's chat template drops messages of role {role!r}: {bridge!r}")
            self._content_start_by_role[role] = bridge.index(ANY_OBSERVATION)
        return self._content_start_by_role[role]

    def _render(self, chat: list[ChatMessage], add_generation_prompt: bool = True) -> str:
        conversation: Any = chat
        return str(
            self._tokenizer.apply_chat_template(
                conversation, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        )

    def _end_of_prefix(self, text: str, chat: list[ChatMessage]) -> int:
        prefix = self._render(chat, add_generation_prompt=False)
        return len(prefix) if text.startswith(prefix) else 0

    def _tokenize(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        encoded: Any = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return encoded["input_ids"], encoded["offset_mapping"]
