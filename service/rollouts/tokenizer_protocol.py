"""The port through which an episode turns token ids into text and observations into token ids.

`TransformersChatTokenizer` (`service/requests/chat_tokenizer.py`) implements it with the model's own tokenizer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rollout_client.contract import ObservationFormat
from rollout_env import ChatMessage

CONTEXT_TOKENS = 32
"""More tokens than the text of the next one depends on: decoders look back a word, or the bytes of one character."""


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How messages become token ids: the format of observations, and the arguments of the chat template."""

    observation_format: ObservationFormat = "chat"
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class TokenizedObservation:
    """An observation's token ids, the text that exactly these ids cover, and whether ids were cut off the end."""

    token_ids: list[int]
    content: str
    was_cut: bool


class ChatTokenizer(Protocol):
    """What an episode calls on the tokenizer."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of `token_ids`, without special tokens."""
        ...

    def pieces(self, token_ids: Sequence[int], before: Sequence[int]) -> list[str | None]:
        """The text that each token adds after the ids `before`, as the engine reads it when it looks for stop strings.

        `None`: the text so far ends inside a character, which later tokens complete. Of `before`, the last
        `CONTEXT_TOKENS` are enough.
        """
        ...

    def observation(
        self, observation: ChatMessage, after: Sequence[int], options: ChatOptions, room: int
    ) -> TokenizedObservation:
        """Tokenizes an observation that follows the generated ids `after`, and keeps its first `room` ids.

        Raises:
            EnvironmentRejected: the chat template cannot render the observation.
        """
        ...
