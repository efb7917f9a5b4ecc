"""Stands for OpenAI's client in tests of agents."""

from collections.abc import Sequence
from typing import Any, Self

from openai.types.chat import ChatCompletion


def says(text: str | None) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


class ScriptedModel:
    """Gives its answers one after another, and keeps the messages of each question."""

    def __init__(self, *answers: dict[str, Any]) -> None:
        self._answers = [*answers]
        self.asked: list[list[Any]] = []
        self.addresses: list[dict[str, str]] = []
        self.chat = self.completions = self

    def with_options(self, **address: str) -> Self:
        self.addresses.append(address)
        return self

    async def create(self, model: str, messages: list[Any], tools: Sequence[Any] = ()) -> ChatCompletion:
        self.asked.append(list(messages))
        choice = {"index": 0, "finish_reason": "stop", "message": self._answers.pop(0)}
        return ChatCompletion.model_validate(
            {"id": "1", "object": "chat.completion", "created": 1, "model": model, "choices": [choice]}
        )
