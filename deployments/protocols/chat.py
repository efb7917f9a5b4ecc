"""The port through which an episode turns token ids into text and observations into token ids.

`TransformersChatTokenizer` (`deployments/chat/chat_tokenizer.py`) implements it with the model's own tokenizer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from rollout_client.contract import ObservationFormat
from rollout_env import ChatMessage

SplitSpecialTokens = Literal["none", "observations", "all"]
"""Whose texts are data, in which the spelling of a control token is ordinary text."""
CONTEXT_TOKENS = 32
"""More tokens than the text of the next one depends on: decoders look back a word, or the bytes of one character."""


class UnsupportedTokenizer(Exception):
    """The model's tokenizer or chat template cannot carry a rollout token-exactly."""


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How messages become token ids: the format of observations, and the arguments of the chat template."""

    observation_format: ObservationFormat = "chat"
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    has_observations: bool = False
    """Whether an environment made messages of the prompt."""
    echoes_answers: bool = False
    """Whether the answers in a prompt are the model's, as a caller has them from the service and sends them back."""


@dataclass(frozen=True, slots=True)
class TokenizedObservation:
    """A message's token ids, the text that exactly these ids cover, and whether ids were cut off after them."""

    token_ids: list[int]
    content: str
    was_cut: bool


class ChatTokenizer(Protocol):
    """What an episode calls on the tokenizer."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a response: without special tokens, or at least without the one that ends its turn."""
        ...

    def pieces(self, token_ids: Sequence[int], before: Sequence[int]) -> list[str | None]:
        """The text that each token adds after the ids `before`, as the engine reads it when it looks for stop strings.

        `None`: the text so far ends inside a character, which later tokens complete. Of `before`, the last
        `CONTEXT_TOKENS` are enough.
        """
        ...

    def observations(
        self,
        messages: Sequence[ChatMessage],
        after: Sequence[int],
        options: ChatOptions,
        room: int,
        calls: Sequence[Mapping[str, Any]] = (),
        calls_before: int = 0,
    ) -> list[TokenizedObservation]:
        """Tokenizes the messages of an observation, at least one, that follow the generated ids `after`.

        They are rendered together, and the first `room` ids are kept. Of messages that have none of these, only the
        first is in the result, without text.

        Args:
            calls: those that were read out of the response. Chat templates take names and ids from them for the
                messages of role `tool` that answer them.
            calls_before: how many calls were read out of the responses before it.

        Raises:
            EnvironmentRejected: the chat template cannot render the messages.
        """
        ...
