"""Customer service of a small shop: tools, a policy text, a customer who talks back, and a reward of what was done.

The shop of a rollout is made from its seed, and the state that travels is the calls that changed it.
"""

import json
import random
import re
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from deployments.environments.shop_data import (
    CHANGES,
    KINDS,
    POLICY,
    TOOLS,
    Declined,
    Kind,
    Scenario,
    Shop,
    ShopCall,
    scenario_of,
    shop_of,
)
from deployments.environments.tool_set import Tool, ToolSet, tool_message
from rollout_env import (
    AnyCall,
    ChatMessage,
    JsonObject,
    MalformedCall,
    SampleRejected,
    SimulatedUser,
    StartOutcome,
    StepOutcome,
    TaskEnvironment,
    UserScenario,
    UserTurn,
    reply_text,
    tool_calls_of,
)

MOST_CHANGES = 32
"""Calls that change the shop, of one rollout: its state travels with each step."""
TOO_MANY = "Error: the shop takes no more changes in this conversation."
LARGEST_SEED = 2**31
AGREES = "Yes, please."
MOST_SCRIPTED_TURNS = 8


class ShopInfo(BaseModel):
    """The `extra_env_info` of a conversation; further fields are ignored."""

    model_config = ConfigDict(extra="ignore", use_attribute_docstrings=True)

    seed: int = Field(ge=0, lt=LARGEST_SEED)
    """The seed of the shop and of its customer."""
    kind: Kind | None = None
    """The customer's request; by default the seed chooses it."""
    persona: str = ""
    """Who the customer is, for a model that plays them."""
    changes: Annotated[list[tuple[str, JsonObject]], Field(max_length=MOST_CHANGES)] = []
    """Name and arguments of the calls that have changed the shop so far."""


class ShopEnvironment(TaskEnvironment):
    """Answers calls, and has the customer answer what is no call, until the customer ends the conversation.

    The reward `solved` is 1 if the shop is then in the state that the customer's request and the policy text lead to,
    and the customer was told what they had to be told. Without a `user_simulator` a scripted customer talks.
    """

    description: ClassVar[str] = "Customer service of a small shop, with tools and a customer who talks back."
    ExtraEnvInfo: ClassVar[type[BaseModel]] = ShopInfo

    def __init__(self, kinds: Annotated[list[Kind], Field(min_length=1)] | None = None) -> None:
        """Makes the tools.

        Args:
            kinds: what the customers of the example samples want; by default anything.
        """
        self._kinds: Sequence[Kind] = kinds or KINDS
        self._user: SimulatedUser | None = None
        schemas = [
            {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}
            for name, (description, schema) in TOOLS.items()
        ]
        self.tools = schemas
        self._tool_set = ToolSet([Tool(schema, str) for schema in schemas])

    def use_user(self, user: SimulatedUser) -> None:
        """Lets this user play the customers, in place of the script."""
        self._user = user

    def start(self, message_log: list[ChatMessage], extra_env_info: ShopInfo) -> StartOutcome:
        """Adds the policy text, to a prompt that has nothing, and the customer's first message."""
        opening: ChatMessage = {
            "role": "user",
            "content": scenario_of(extra_env_info.seed, extra_env_info.kind).opening,
        }
        policy: ChatMessage = {"role": "system", "content": POLICY}
        return StartOutcome([opening] if message_log else [policy, opening])

    async def step(self, message_log: list[ChatMessage], extra_env_info: ShopInfo) -> StepOutcome:
        """Raises what the user raises, and `SampleRejected` if `changes` are not some that the shop takes."""
        scenario = scenario_of(extra_env_info.seed, extra_env_info.kind)
        shop = shop_of(extra_env_info.seed)
        try:
            shop.make(ShopCall(*change) for change in extra_env_info.changes)
        except (Declined, KeyError, TypeError, AttributeError) as error:
            raise SampleRejected(f"extra_env_info.changes: the shop does not take them: {error}.") from error
        if calls := tool_calls_of(message_log[-1], self.tools):
            return self._answered(calls, shop, scenario, message_log, extra_env_info)
        user = self._user or ScriptedCustomer(scenario)
        turn = await user.turn(message_log, UserScenario(scenario.goal, extra_env_info.persona))
        said: ChatMessage | None = {"role": "user", "content": turn.content} if turn.content else None
        if turn.has_ended:
            return judged(said, shop, scenario, message_log, turn.metrics)
        return StepOutcome(said, {"solved": 0.0}, terminated=False, metrics=turn.metrics)

    def _answered(
        self,
        calls: Sequence[AnyCall],
        shop: Shop,
        scenario: Scenario,
        message_log: list[ChatMessage],
        info: ShopInfo,
    ) -> StepOutcome:
        """The results of the calls. A conversation that is handed over ends."""
        changes, answers, malformed = list(info.changes), [], 0
        for call in map(self._tool_set.checked, calls):
            if isinstance(call, MalformedCall):
                malformed += 1
                answers.append(tool_message(f"Error: {call.problem}", call))
            elif call.name in CHANGES and len(changes) >= MOST_CHANGES:
                answers.append(tool_message(TOO_MANY, call))
            else:
                made = ShopCall(call.name, call.arguments)
                answers.append(tool_message(told(shop, made, changes), call))
        metrics = {"calls": float(len(calls)), "malformed_calls": float(malformed)}
        if shop.handed_over:
            return judged(answers, shop, scenario, message_log, metrics)
        state = info.model_copy(update={"changes": changes}).model_dump(mode="json")
        return StepOutcome(answers, {"solved": 0.0}, terminated=False, metadata=state, metrics=metrics)

    def example_samples(self, count: int, seed: int) -> list[dict[str, Any]]:
        """Customers of all kinds, in turn."""
        first = random.Random(seed).randrange(LARGEST_SEED // 2)
        return [
            {"extra_env_info": {"seed": first + place, "kind": self._kinds[place % len(self._kinds)]}}
            for place in range(count)
        ]


class ScriptedCustomer(SimulatedUser):
    """Answers by words of the reply: says the email address or the order's number where asked, agrees once or twice.

    A reply that asks for nothing ends the conversation.
    """

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario

    async def turn(self, message_log: Sequence[ChatMessage], scenario: UserScenario) -> UserTurn:  # noqa: ARG002
        own = [message["content"] for message in message_log if message["role"] == "user"]
        reply = reply_text(message_log[-1]).lower()
        answers = {
            f"My email address is {self._scenario.email}.": "email" in reply or "e-mail" in reply,
            f"The number of the order is {self._scenario.order_id}.": "order" in reply
            and any(word in reply for word in ("number", "order id", "which order")),
        }
        said = " ".join(answer for answer, is_asked in answers.items() if is_asked and answer not in " ".join(own))
        if not said and ("?" in reply or "confirm" in reply) and own.count(AGREES) < 2:
            said = AGREES
        if not said or len(own) >= MOST_SCRIPTED_TURNS:
            return UserTurn("", has_ended=True)
        return UserTurn(said)


def told(shop: Shop, call: ShopCall, changes: list[tuple[str, JsonObject]]) -> str:
    """Makes a call, and adds it to the changes if it is one. What the shop declines is told."""
    try:
        [result] = shop.make([call])
    except Declined as declined:
        return f"Error: {declined}"
    if call.name in CHANGES:
        changes.append((call.name, dict(call.arguments)))
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)


def judged(
    observation: ChatMessage | list[ChatMessage] | None,
    shop: Shop,
    scenario: Scenario,
    message_log: Sequence[ChatMessage],
    metrics: dict[str, float],
) -> StepOutcome:
    """The end of a conversation, with its reward."""
    replies = [reply_text(message).replace(",", "") for message in message_log if message["role"] == "assistant"]
    is_right = shop == scenario.shop_afterwards
    was_told = all(any(says(output, reply) for reply in replies) for output in scenario.outputs)
    return StepOutcome(
        observation,
        {"solved": float(is_right and was_told)},
        terminated=True,
        metrics={**metrics, "database_right": float(is_right), "outputs_right": float(was_told)},
    )


def says(output: str, reply: str) -> bool:
    """Whether the reply has the output, and not as a part of a longer number."""
    return re.search(rf"(?<![\d.]){re.escape(output)}(?!\d)", reply) is not None
