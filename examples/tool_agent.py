"""An agent with a tool: it answers multiplications in words, and may ask a calculator (`examples/train_agent.py`).

The embedded model with tools was never trained on these words: it often asks the calculator for a sum.
"""

import json
from collections.abc import Sequence
from functools import cache
from typing import Any
from zlib import crc32

from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageFunctionToolCall

from deployments.tasks.replies import last_box
from deployments.tasks.tool_calls import calculate
from rollout_client import SampleInput

WORDINGS = ("What is {} times {}?", "There are {} shelves with {} books each. How many books are there?")
LARGEST_OPERAND = 99
HELD_OUT_SHARE = 10
"""One pair of operands in so many is for measuring, in either order and in each wording."""
CALCULATOR = {
    "name": "calculator",
    "description": "Evaluates an arithmetic expression.",
    "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
}
TOOLS: Any = [{"type": "function", "function": CALCULATOR}]
"""As the embedded model has learnt them."""
MOST_CALLS = 3
"""Answers of the model, the last one included."""


async def agent(base_url: str, api_key: str, sample: SampleInput) -> float:
    """Returns 1 for the right answer after a call of a tool, else 0."""
    model = connections().with_options(base_url=base_url, api_key=api_key)
    messages: list[Any] = [message.model_dump(exclude_unset=True) for message in sample.messages or ()]
    for calls in range(MOST_CALLS):
        completion = await model.chat.completions.create(model="any", messages=messages, tools=TOOLS)
        answer = completion.choices[0].message
        if not answer.tool_calls:
            return float(calls > 0 and last_box(answer.content or "") == str(sample.extra_env_info["product"]))
        messages.append(answer.model_dump(exclude_none=True))
        messages += [result_of(call) for call in answer.tool_calls]
    return 0.0


@cache
def connections() -> AsyncOpenAI:
    """Shared by all rollouts, each of which has an address of its own."""
    return AsyncOpenAI(base_url="http://127.0.0.1", api_key="any")


def result_of(call: Any) -> dict[str, Any]:
    """The result of the calculator, or the error of the call."""
    result = "Error: this is no call of a tool."
    if isinstance(call, ChatCompletionMessageFunctionToolCall) and call.function.name == "calculator":
        try:
            result = calculate(str(json.loads(call.function.arguments)["expression"]))
        except (ValueError, TypeError, KeyError, ZeroDivisionError):
            result = "Error: the arguments are no expression."
    return {"role": "tool", "tool_call_id": call.id, "content": result}


def questions(held_out: bool) -> Sequence[SampleInput]:
    """All that are, or are not, held out."""
    operands = range(LARGEST_OPERAND + 1)
    pairs = [(left, right) for left in operands for right in operands if is_held_out(left, right) == held_out]
    return [
        SampleInput.model_validate(
            {
                "task_name": "tool_agent",
                "messages": [{"role": "user", "content": wording.format(left, right)}],
                "extra_env_info": {"product": left * right},
            }
        )
        for left, right in pairs
        for wording in WORDINGS
    ]


def is_held_out(left: int, right: int) -> bool:
    return crc32(f"{min(left, right)} {max(left, right)}".encode()) % HELD_OUT_SHARE == 0
