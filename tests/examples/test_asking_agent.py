"""The agent of the documentation, as the service would run it."""

import asyncio
from contextlib import nullcontext

import pytest

from examples import asking_agent
from rollout_client import SampleInput
from tests.examples.scripted_model import ScriptedModel, says
from tests.paths import REPOSITORY


def test_it_asks_twice_and_goes_on_with_its_first_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ScriptedModel(says("4"), says("Yes."))
    monkeypatch.setattr(asking_agent, "AsyncOpenAI", lambda **_address: nullcontext(model))
    sample = SampleInput.model_validate({"task_name": "math", "messages": [{"role": "user", "content": "2+2?"}]})
    asyncio.run(asking_agent.agent("http://service/v1", "key", sample))
    roles = [[message["role"] for message in asked] for asked in model.asked]
    assert roles == [["user"], ["user", "assistant", "user"]]


def test_the_documentation_shows_the_same_code() -> None:
    _, _, code = (REPOSITORY / "examples" / "asking_agent.py").read_text().split('"""', 2)
    assert f"```python\n{code.strip()}\n```" in (REPOSITORY / "docs" / "agents.md").read_text()
