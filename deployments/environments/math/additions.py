"""Additions: the example samples of the task `math`."""

from typing import Any

LARGEST_OPERAND = 99


def addition_prompt(left: int, right: int) -> str:
    """The question, e.g. `What is 17 + 25?`."""
    return f"What is {left} + {right}?"


def addition_sample(left: int, right: int) -> dict[str, Any]:
    """One addition as a sample of a rollout request."""
    return {
        "messages": [{"role": "user", "content": addition_prompt(left, right)}],
        "extra_env_info": {"ground_truth": str(left + right)},
    }
