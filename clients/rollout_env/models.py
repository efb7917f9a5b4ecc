"""Models that an environment asks, such as judges: what the service hands to it, and scripted ones for tests."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rollout_env.records import ChatMessage, JsonObject, TemporaryFailure

MARKER_CHARACTERS = re.compile("[<~\u25c1]|\\[(?=[/|]|[a-z]?[A-Z])")
"""One of them is in each control token of the common families of models: `<|im_end|>`, `</s>`, `[INST]`, `]~b]`."""


def escape_control_tokens(text: str) -> str:
    """The text with the characters of control tokens in JSON's spelling, such as `\\u003c|im_end|>`.

    A model's server reads the spelling of a control token in a message as that token, so that what a policy wrote could
    end the message to its judge and go on in the judge's place. Which tokens a server has is not known here; in this
    spelling it has none. JSON stays the same value. A model reads other text as well.
    """
    return MARKER_CHARACTERS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def json_data(value: Any) -> str:
    """JSON of what a model is to judge, without control tokens, for a message to that model."""
    return escape_control_tokens(json.dumps(value, ensure_ascii=False, indent=1))


class ModelUnavailable(TemporaryFailure):
    """The model did not answer, although it was asked again. The step is made again, as the `retries` allow."""


class ModelRefused(Exception):
    """The model's server refuses the request as it is, or answers what is no answer. Asking again would not help."""


@dataclass(frozen=True, slots=True)
class ModelReply:
    """What a model answered."""

    content: str
    """Empty if it only made calls."""
    tool_calls: list[JsonObject] = field(default_factory=list)
    """In OpenAI's form."""
    reasoning_content: str | None = None
    finish_reason: str = "stop"
    """`length` if it was cut off."""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    seconds: float = 0.0
    """From the call to the answer, with what was waited for a place and for retries."""
    attempts: int = 1


class ChatModel(Protocol):
    """A model that answers messages. Any number of calls may be made at once; the client bounds what it sends."""

    async def chat(self, messages: Sequence[ChatMessage], **parameters: Any) -> ModelReply:
        """Asks the model.

        Args:
            parameters: of OpenAI's chat completions, such as `temperature`; those of the config are the defaults.

        Raises:
            ModelUnavailable: no answer, or failures that may pass, for as long as the config says.
            ModelRefused: the server refuses the request.
        """
        ...


class RewardModel(Protocol):
    """A model that gives a conversation a number."""

    async def score(self, messages: Sequence[ChatMessage]) -> float:
        """The score of the whole conversation, which is finite. Conversations of the same moment travel together.

        Raises:
            ModelUnavailable: no replica answers.
            ModelRefused: the conversation cannot be scored.
        """
        ...


@dataclass
class ScriptedChatModel(ChatModel):
    """Answers with the next entry of its script, or raises it; for tests."""

    script: Sequence[str | ModelReply | Exception]
    asked: list[tuple[list[ChatMessage], Mapping[str, Any]]] = field(default_factory=list)
    """Messages and parameters of each call."""

    async def chat(self, messages: Sequence[ChatMessage], **parameters: Any) -> ModelReply:
        answer = self.script[len(self.asked) % len(self.script)]
        self.asked.append((list(messages), parameters))
        if isinstance(answer, Exception):
            raise answer
        return ModelReply(answer) if isinstance(answer, str) else answer


@dataclass
class ScriptedRewardModel(RewardModel):
    """Gives the next entry of its script, or raises it; for tests."""

    script: Sequence[float | Exception]
    asked: list[list[ChatMessage]] = field(default_factory=list)

    async def score(self, messages: Sequence[ChatMessage]) -> float:
        answer = self.script[len(self.asked) % len(self.script)]
        self.asked.append(list(messages))
        if isinstance(answer, Exception):
            raise answer
        return answer
