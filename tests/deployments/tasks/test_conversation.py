"""Conversations with a user that another environment judges at their end."""

from typing import Any

import pytest
from pydantic import BaseModel

from deployments.tasks.conversation import ConversationEnvironment
from deployments.tasks.multi_reward import EnvironmentPart
from rollout_env import ChatMessage, ModelUser, ScriptedChatModel, StepOutcome, check, play
from tests.fakes.environment import StepsAlone

TOOLS = "deployments.tasks.tool_calls:ToolCallsEnvironment"
SAMPLE = {
    "messages": [{"role": "user", "content": "What is 1 + 1?"}],
    "extra_env_info": {"goal": "To learn what 1 + 1 is.", "judge": {"ground_truth": 2}},
}


def judged_by_tools(**fields: Any) -> ConversationEnvironment:
    return ConversationEnvironment(EnvironmentPart(import_path=TOOLS), **fields)


def test_the_judge_sees_the_conversation_once_the_user_has_ended_it() -> None:
    environment = judged_by_tools()
    model = ScriptedChatModel(["Are you sure?", "###STOP###"])
    environment.use_user(ModelUser(model))
    call = '<tool_call>{"name": "calculator", "arguments": {"expression": "1 + 1"}}</tool_call>'
    played = play(environment, ["3", call, "2"], SAMPLE)
    assert [message["content"] for message in played.message_log] == [
        "What is 1 + 1?",
        "3",
        "Are you sure?",
        call,
        "2",
        "2",
        "Environment: correct.",
    ]
    assert (played.total_reward, played.terminated, played.metrics["user_calls"]) == (1.0, True, 2)
    assert "Your goal: To learn what 1 + 1 is." in model.asked[0][0][0]["content"]


def test_without_a_model_the_user_says_the_follow_ups() -> None:
    played = play(judged_by_tools(follow_ups=["Are you sure?"]), ["3", "2"], SAMPLE)
    assert [message["content"] for message in played.message_log[2:]] == ["Are you sure?", "2", "Environment: correct."]
    assert (played.total_reward, played.terminated) == (1.0, True)


class Anything(BaseModel):
    """No fields."""


class Endless(StepsAlone):
    """Judges each reply, and would go on."""

    ExtraEnvInfo = Anything

    async def step(self, message_log: list[ChatMessage], extra_env_info: Anything) -> StepOutcome:
        return StepOutcome({"role": "user", "content": "Go on."}, 0.5, terminated=False)


def test_the_end_of_the_user_is_the_end_whatever_the_judge_says() -> None:
    judge = EnvironmentPart(import_path=f"{__name__}:Endless")
    played = play(ConversationEnvironment(judge), ["3"], {"messages": SAMPLE["messages"], "extra_env_info": {}})
    assert (played.total_reward, played.terminated) == (0.5, True)


def test_a_judge_with_a_start_is_refused() -> None:
    with pytest.raises(ValueError, match="has a start or sessions"):
        EnvironmentPart(import_path="deployments.tasks.shapes:ShapesEnvironment")


def test_a_conversation_keeps_the_rules_for_environments() -> None:
    check(lambda: judged_by_tools(follow_ups=["Are you sure?"]))
