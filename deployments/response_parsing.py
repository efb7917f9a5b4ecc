"""The port of what reads tool calls and reasoning out of responses, and the records that cross it.

The rollout loop calls `ResponseParser`. `ProcessResponseParser` (`service/remote/response_parser.py`) implements it
with vLLM's parsers (`deployments/generation/response_parser.py`) in processes of their own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class ResponseToParse:
    """A whole response, and what its parsers want to know of its sample."""

    token_ids: Sequence[int]
    prompt_token_ids: Sequence[int] = ()
    """All ids before the response."""
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    turn: int = 0
    """How many responses of the rollout came before it: the ids of its calls differ from theirs."""


@dataclass(frozen=True, slots=True)
class ParsedResponse:
    """What was read out of a response. Nothing of this has tokens: those of the response are never changed."""

    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    """In OpenAI's form: `{"id": ..., "type": "function", "function": {"name": ..., "arguments": JSON text}}`."""
    reasoning_content: str | None = None
    parsed_content: str | None = None
    """The text without calls and reasoning; `None` if there are none of them."""
    parse_error: str | None = None
    """Why the response, or the calls in it, could not be read."""


class ResponseParser(Protocol):
    """Reads tool calls and reasoning out of responses. The rollout loop calls it."""

    async def parse(self, response: ResponseToParse) -> ParsedResponse:
        """What cannot be read is a `parse_error`. The call may be cancelled, and raises nothing else."""
        ...
