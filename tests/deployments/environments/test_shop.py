"""Conversations in the shop, with its scripted customer and with users of a model."""

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.environments.host import EnvironmentHost
from deployments.environments.shop import ShopEnvironment, says
from deployments.environments.shop_data import KINDS, POLICY, Kind, ShopCall, scenario_of, shop_of
from deployments.failures import EnvironmentLost, RolloutFailure
from deployments.models.settings import ChatModelSettings, UserSimulatorSettings
from deployments.protocols.environments import StepRequest
from rollout_env import (
    ChatMessage,
    ModelUser,
    PlayResult,
    SampleRejected,
    ScriptedChatModel,
    StepOutcome,
    check,
    play,
)
from tests.deployments.models.chat_server import Answer, chat_server, said

WHO = "Could you tell me your email address and the order number?"


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def as_call(change: ShopCall) -> str:
    return call(change.name, **change.arguments)


def served(kind: Kind, *replies: str, seed: int = 7, environment: ShopEnvironment | None = None) -> PlayResult:
    sample = {"extra_env_info": {"seed": seed, "kind": kind}}
    return play(environment or ShopEnvironment(), replies, sample)


def by_the_rules(kind: Kind, seed: int = 7) -> PlayResult:
    """A conversation of a policy that does everything right."""
    scenario = scenario_of(seed, kind)
    replies = [
        WHO,
        call("find_customer", email=scenario.email),
        call("get_order", order_id=scenario.order_id),
        "I will do that. Do you agree?",
        *map(as_call, scenario.solution),
        f"Done. {' '.join(scenario.outputs)}",
        "Goodbye.",
    ]
    return served(kind, *replies, seed=seed)


@given(st.integers(min_value=0, max_value=2**31 - 1), st.sampled_from(KINDS))
def test_what_the_rules_lead_to_solves_every_scenario(seed: int, kind: Kind) -> None:
    played = by_the_rules(kind, seed)
    assert (played.rewards, played.terminated) == ({"solved": 1.0}, True)


def test_a_conversation_begins_with_policy_text_and_request_and_the_script_answers() -> None:
    played = by_the_rules("cancel")
    scenario = scenario_of(7, "cancel")
    system, opening, _, answer, *_ = played.message_log
    assert (system["role"], system["content"]) == ("system", POLICY)
    assert (opening["role"], opening["content"]) == ("user", scenario.opening)
    assert answer["content"] == f"My email address is {scenario.email}. The number of the order is {scenario.order_id}."
    assert [message["content"] for message in played.message_log if message["role"] == "user"][-1] == "Yes, please."
    assert {name: played.metrics[name] for name in ("database_right", "outputs_right", "calls", "malformed_calls")} == {
        "database_right": 1.0,
        "outputs_right": 1.0,
        "calls": 3.0,
        "malformed_calls": 0.0,
    }


@pytest.mark.parametrize("kind", ["cancel", "return", "address", "damaged"])
def test_to_do_nothing_solves_nothing_that_needs_a_change(kind: Kind) -> None:
    assert served(kind, "Goodbye.").rewards == {"solved": 0.0}


@pytest.mark.parametrize("kind", ["cancel_shipped", "return_late"])
def test_to_decline_is_right_where_the_rules_say_so(kind: Kind) -> None:
    assert served(kind, "I am sorry, that is not possible.").rewards == {"solved": 1.0}


def test_a_change_that_the_rules_do_not_permit_is_wrong_though_the_tool_makes_it() -> None:
    solution = scenario_of(7, "return").solution
    [late] = [order for order in shop_of(7).orders.values() if order.get("delivered_days_ago", 0) > 30]
    wrong = call("return_items", order_id=late["order_id"], item_ids=[late["items"][0]["item_id"]])
    assert served("return_late", wrong, "Done.").rewards == {"solved": 0.0}
    assert served("return", *map(as_call, solution), wrong, "Done.").rewards == {"solved": 0.0}
    assert served("return", *map(as_call, solution), "Done.").rewards == {"solved": 1.0}


def test_a_colleague_ends_the_conversation_and_is_right_for_damage_alone() -> None:
    hand_over = call("hand_over", summary="It is broken.")
    played = served("damaged", hand_over)
    assert (played.rewards, played.terminated) == ({"solved": 1.0}, True)
    assert served("cancel_shipped", hand_over).rewards == {"solved": 0.0}


def test_an_amount_must_be_told_and_not_be_part_of_another_one() -> None:
    [total] = scenario_of(7, "total").outputs
    assert served("total", f"It was €{total}.").rewards == {"solved": 1.0}
    wrong = served("total", f"It was 1{total}.")
    assert (wrong.rewards, wrong.metrics["outputs_right"], wrong.metrics["database_right"]) == (
        {"solved": 0.0},
        0.0,
        1.0,
    )
    assert says("1084.50", "It was 1,084.50.".replace(",", ""))
    assert not says("84.50", "184.50")
    assert not says("84.50", "84.501")


def test_what_the_shop_declines_is_told_and_changes_nothing() -> None:
    number = scenario_of(7, "cancel_shipped").order_id
    played = served(
        "cancel_shipped",
        call("cancel_order", order_id=number, reason="no longer needed"),
        call("cancel_order", order_id=number, reason="a whim"),
        call("find_customer", email="no@one"),
        "That is not possible.",
    )
    shipped, malformed, unknown = (message["content"] for message in played.message_log if message["role"] == "tool")
    assert shipped == f"Error: order {number} is shipped"
    assert malformed.startswith("Error: The call of cancel_order is not valid: arguments.reason")
    assert unknown == "Error: there is no customer no@one"
    assert (played.rewards, played.metrics["malformed_calls"]) == ({"solved": 1.0}, 1.0)


def test_a_model_plays_the_customer_where_the_config_has_one() -> None:
    model = ScriptedChatModel(["It is W1, I think.", "Bye. ###STOP###"])
    environment = ShopEnvironment()
    environment.use_user(ModelUser(model, persona="You are in a hurry."))
    played = served("cancel", "Which order?", "Anything else?", environment=environment)
    assert [message["content"] for message in played.message_log[-3:]] == [
        "It is W1, I think.",
        "Anything else?",
        "Bye.",
    ]
    assert (played.rewards, played.terminated, played.metrics["user_calls"]) == ({"solved": 0.0}, True, 2)
    instructions = model.asked[0][0][0]["content"]
    assert f"Your goal: {scenario_of(7, 'cancel').goal}" in instructions
    assert "You are in a hurry." in instructions


def test_changes_that_the_shop_does_not_take_are_rejected() -> None:
    changes = [["cancel_order", {"order_id": "W0", "reason": "no longer needed"}]]
    with pytest.raises(SampleRejected, match="changes: the shop does not take them: there is no order W0"):
        play(ShopEnvironment(), ["Hi."], {"extra_env_info": {"seed": 7, "changes": changes}})


def test_the_shop_keeps_the_rules_for_environments() -> None:
    look = call("find_customer", email="ada.berg@example.org")
    check(ShopEnvironment, replies=[WHO, look, "I will do that. Do you agree?", "Goodbye."])


def test_the_host_asks_the_user_of_the_config_and_a_user_who_is_away_is_no_zero() -> None:
    log: list[ChatMessage] = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Which order?"}]

    async def answered(url: str) -> StepOutcome | RolloutFailure:
        host = EnvironmentHost(
            "shop",
            "deployments.environments.shop:ShopEnvironment",
            {},
            step_timeout_s=None,
            chat_models={"customer": ChatModelSettings.model_validate({"base_url": url, "model": "m", "retries": 0})},
            user_simulator=UserSimulatorSettings(model="customer", persona="You are curt."),
        )
        step = StepRequest(log, {"seed": 7})
        [result] = [result async for item in host.step([step]) for _, result in item.results]
        return result

    answers = iter([said("W1."), Answer(status=503)])
    with chat_server(lambda *_: next(answers)) as server:
        outcome = asyncio.run(answered(server.url))
        away = asyncio.run(answered(server.url))
    assert isinstance(outcome, StepOutcome)
    assert (outcome.observation, outcome.terminated) == ({"role": "user", "content": "W1."}, False)
    assert (outcome.metrics or {})["user_completion_tokens"] == 3
    assert "You are curt." in server.requests[0]["messages"][0]["content"]
    assert isinstance(away, EnvironmentLost)
    assert "The model customer did not answer in 1 attempt: status 503." in str(away)
