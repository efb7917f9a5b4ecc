"""The agent of the documentation, as the service would run it."""

import asyncio
from typing import Any

import pytest

import examples.asking_agent
from deployments.agents.programs import _load_agent
from rollout_client import SampleInput
from tests.paths import REPOSITORY


class Answered:
    """Stands for OpenAI's client: answers each call with the number of its messages."""

    asked: list[Any]

    def __init__(self, base_url: str, api_key: str) -> None:
        self.given = base_url, api_key
        self.chat = self.completions = self

    async def __aenter__(self) -> "Answered":
        return self

    async def __aexit__(self, *_: object) -> None:
        """Is closed."""

    async def create(self, model: str, messages: list[Any]) -> Any:
        self.asked.append(list(messages))
        reply = type("Reply", (), {"model_dump": lambda *_, **__: {"role": "assistant", "content": "4"}})()
        return type("Answer", (), {"choices": [type("Choice", (), {"message": reply})()]})()


def test_it_asks_twice_and_goes_on_with_its_first_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    Answered.asked = []
    monkeypatch.setattr(examples.asking_agent, "AsyncOpenAI", Answered)
    sample = SampleInput.model_validate({"task_name": "math", "messages": [{"role": "user", "content": "2+2?"}]})
    asyncio.run(_load_agent("examples.asking_agent:agent")("http://service/v1", "key", sample))  # type: ignore[arg-type]
    assert [[message["role"] for message in asked] for asked in Answered.asked] == [
        ["user"],
        ["user", "assistant", "user"],
    ]


def test_the_documentation_shows_the_same_code() -> None:
    _, _, code = (REPOSITORY / "examples" / "asking_agent.py").read_text().split('"""', 2)
    assert f"```python\n{code.strip()}\n```" in (REPOSITORY / "docs" / "agents.md").read_text()
