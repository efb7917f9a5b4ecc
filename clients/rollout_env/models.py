"""Models that an environment calls, such as judges: their protocols, and scripted ones for tests."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rollout_env.records import ChatMessage, JsonObject, TemporaryFailure

MARKER_CHARACTERS = re.compile("[<~\u25c1]|\\[(?=[/|]|[a-z]?[A-Z])")
"""Characters of which each control token of common model families has one: `<|im_end|>`, `</s>`, `[INST]`, `]~b]`."""


MARKERS_BESIDE_MOVES = re.compile(
    "[<~\u25c1]|\\[(?=/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_[A-Z]{1,20}|IMG[A-Z_]{0,10}|THINK|MODEL_SETTINGS"
    "|[gs]?MASK|UNUSED[A-Z0-9_]{0,20})\\])"
)
"""The same in the text of a game, where moves and speakers are often in square brackets, such as `[A C]`: these stay,
and of control tokens in square brackets those of Mistral and GLM are known."""


def escape_control_tokens(text: str, markers: re.Pattern[str] = MARKER_CHARACTERS) -> str:
    """The text with the characters of control tokens escaped as in JSON, such as `\\u003c|im_end|>`.

    A model's server reads the text of a control token in a message as that token, so a policy's output could end the
    message to its judge and continue in the judge's place. The server's tokens are unknown here; escaped, none matches.
    Escaped JSON keeps its value, and models can still read other escaped text.
    """
    return markers.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def json_data(value: Any) -> str:
    """JSON without control tokens, for a message to a model."""
    return escape_control_tokens(json.dumps(value, ensure_ascii=False, indent=1))


class ModelUnavailable(TemporaryFailure):
    """The model did not answer, despite retries. The step is retried, as the request's `retries` allow."""


class ModelRefused(Exception):
    """The model's server rejects the request, or its response is malformed. A retry would not help."""


@dataclass(frozen=True, slots=True)
class ModelReply:
    """A model's answer."""

    content: str
    """Text; empty if it only made calls."""
    tool_calls: list[JsonObject] = field(default_factory=list)
    """Calls in OpenAI's form."""
    reasoning_content: str | None = None
    finish_reason: str = "stop"
    """`length` if it was cut off."""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    seconds: float = 0.0
    """Time from the call to the answer, including waits for capacity and for retries."""
    attempts: int = 1


class ChatModel(Protocol):
    """A model that answers messages. Any number of calls may be made at once; the client bounds what it sends."""

    async def chat(self, messages: Sequence[ChatMessage], **parameters: Any) -> ModelReply:
        """Asks the model.

        Args:
            parameters: those of OpenAI's chat completions, such as `temperature`; those of the config are the defaults.

        Raises:
            ModelUnavailable: no answer, or temporary failures, for as long as the config says.
            ModelRefused: the server refuses the request.
        """


class RewardModel(Protocol):
    """A model that scores conversations."""

    async def score(self, messages: Sequence[ChatMessage]) -> float:
        """Returns the score of the whole conversation, which is finite. Concurrent calls are batched.

        Raises:
            ModelUnavailable: no replica answers.
            ModelRefused: the conversation cannot be scored.
        """


@dataclass
class ScriptedChatModel(ChatModel):
    """Answers with the next entry of its script, or raises it; for tests."""

    script: Sequence[str | ModelReply | Exception]
    asked: list[tuple[list[ChatMessage], Mapping[str, Any]]] = field(default_factory=list)
    """Messages and parameters of each call."""

    async def chat(self, messages: Sequence[ChatMessage], **parameters: Any) -> ModelReply:
        self.asked.append((list(messages), parameters))
        answer: str | ModelReply = _next_of(self.script, self.asked)
        return ModelReply(answer) if isinstance(answer, str) else answer


@dataclass
class ScriptedRewardModel(RewardModel):
    """Gives the next entry of its script, or raises it; for tests."""

    script: Sequence[float | Exception]
    asked: list[list[ChatMessage]] = field(default_factory=list)

    async def score(self, messages: Sequence[ChatMessage]) -> float:
        self.asked.append(list(messages))
        score: float = _next_of(self.script, self.asked)
        return score


def _next_of(script: Sequence[Any], asked: Sequence[object]) -> Any:
    answer = script[(len(asked) - 1) % len(script)]
    if isinstance(answer, Exception):
        raise answer
    return answer
