"""Users that a model plays: what the model is asked, when the conversation ends, what a turn cost."""

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_env import ChatMessage, ModelReply, ModelUser, ScriptedChatModel, UserScenario, UserTurn, UserTurnMissing
from rollout_env.users import GREETING

CALL = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
LOG: list[ChatMessage] = [
    {"role": "system", "content": "You serve."},
    {"role": "user", "content": "Hi."},
    {"role": "assistant", "content": CALL},
    {"role": "tool", "content": "secret"},
    {"role": "assistant", "content": "<think>Hm.</think>Which order<|im_end|>?"},
]
LAMP = UserScenario("A lamp.")


def turn_of(
    *script: str | ModelReply | Exception, log: list[ChatMessage] = LOG, scenario: UserScenario = LAMP, **fields: Any
) -> tuple[UserTurn, ScriptedChatModel]:
    model = ScriptedChatModel(script)
    return asyncio.run(ModelUser(model, **fields).turn(log, scenario)), model


def test_the_model_sees_both_sides_without_calls_and_control_tokens() -> None:
    _, model = turn_of("W1.")
    [(asked, _)] = model.asked
    assert asked[1:] == [
        {"role": "user", "content": GREETING},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "Which order\\u003c|im_end|>?"},
    ]


def test_goal_and_persona_of_the_scenario_go_before_those_of_the_config() -> None:
    _, model = turn_of("W1.", goal="A kettle.", persona="You are curt.")
    instructions = model.asked[0][0][0]["content"]
    assert ("Your goal: A lamp." in instructions, "Who you are: You are curt." in instructions) == (True, True)
    _, model = turn_of("W1.", scenario=UserScenario(persona="You shout."), goal="A kettle.", persona="You are curt.")
    instructions = model.asked[0][0][0]["content"]
    assert ("Your goal: A kettle." in instructions, "Who you are: You shout." in instructions) == (True, True)
    assert "You are curt." not in instructions


def test_a_turn_counts_the_calls_tokens_and_seconds_of_the_model() -> None:
    empty = ModelReply("<think>Hm.</think> ", prompt_tokens=10, completion_tokens=2, seconds=1.0)
    said = ModelReply(" W1. ", prompt_tokens=10, completion_tokens=4, seconds=2.0)
    turn, _ = turn_of(empty, said)
    metrics = {"user_calls": 2, "user_prompt_tokens": 20, "user_completion_tokens": 6, "user_seconds": 3.0}
    assert turn == UserTurn("W1.", has_ended=False, metrics=metrics)


def test_the_stop_ends_the_conversation_after_the_text_before_it() -> None:
    turn, _ = turn_of("Thanks! ###STOP###")
    assert (turn.content, turn.has_ended) == ("Thanks!", True)
    turn, _ = turn_of("DONE", stop="DONE")
    assert (turn.content, turn.has_ended) == ("", True)
    turn, _ = turn_of("DONE")
    assert (turn.content, turn.has_ended) == ("DONE", False)


def test_the_last_turn_ends_the_conversation_without_a_call() -> None:
    turn, model = turn_of("More.", max_turns=1)
    assert (turn, model.asked) == (UserTurn("", has_ended=True), [])
    assert not turn_of("More.", max_turns=2)[0].has_ended


def test_a_user_without_a_turn_is_a_failure_that_may_pass_and_no_end() -> None:
    model = ScriptedChatModel(["", " "])
    with pytest.raises(UserTurnMissing, match="said nothing in 2 answers"):
        asyncio.run(ModelUser(model, attempts=2).turn(LOG, UserScenario("A lamp.")))
    assert len(model.asked) == 2


@given(st.lists(st.tuples(st.sampled_from(["user", "assistant", "tool", "system"]), st.text()), max_size=12))
def test_the_sides_always_take_turns(messages: list[tuple[Any, str]]) -> None:
    log: list[ChatMessage] = [{"role": role, "content": content} for role, content in messages]
    _, model = turn_of("W1.", log=log, max_turns=100)
    roles = [message["role"] for message in model.asked[0][0]]
    assert roles == ["system", *(("user", "assistant")[place % 2] for place in range(len(roles) - 1))]
