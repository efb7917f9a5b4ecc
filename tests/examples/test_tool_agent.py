"""The agent with a tool that `examples/train_agent.py` trains, against scripted answers of a model."""

import asyncio
import json
from typing import Any

import pytest

from examples import tool_agent
from rollout_client import SampleInput
from tests.examples.scripted_model import ScriptedModel, says

QUESTION = SampleInput.model_validate(
    {
        "task_name": "tool_agent",
        "messages": [{"role": "user", "content": "What is 3 times 4?"}],
        "extra_env_info": {"product": 12},
    }
)


def asks(expression: Any, tool: str = "calculator") -> dict[str, Any]:
    function = {"name": tool, "arguments": json.dumps({"expression": expression})}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "type": "function", "function": function}]}


def played(monkeypatch: pytest.MonkeyPatch, *answers: dict[str, Any]) -> tuple[float, list[list[Any]]]:
    model = ScriptedModel(*answers)
    monkeypatch.setattr(tool_agent, "connections", lambda: model)
    reward = asyncio.run(tool_agent.agent("http://session/v1", "key", QUESTION))
    assert model.addresses == [{"base_url": "http://session/v1", "api_key": "key"}]
    return reward, model.asked


def test_it_calculates_what_the_model_asks_and_rewards_the_right_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    reward, asked = played(monkeypatch, asks("3 * 4"), says("\\boxed{12}"))
    assert reward == 1.0
    assert asked[1][-1] == {"role": "tool", "tool_call_id": "a", "content": "12"}


def test_no_held_out_question_is_trained_on_in_either_order() -> None:
    def operands(held_out: bool) -> set[frozenset[int]]:
        texts = [str(question.messages[0].content) for question in tool_agent.questions(held_out) if question.messages]
        return {frozenset(int(word) for word in text.replace("?", "").split() if word.isdecimal()) for text in texts}

    held_out, trained = operands(True), operands(False)
    assert not held_out & trained
    assert (len(held_out), len(held_out | trained)) == (504, 100 * 101 // 2)
