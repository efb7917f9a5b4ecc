"""The contract of sessions: what it refuses, and what a reward means."""

from typing import Any

import pytest
from pydantic import ValidationError

from rollout_client.contract.sessions import SessionReward


@pytest.mark.parametrize(
    ("body", "parts"),
    [
        ({"reward": 0.0}, {"reward": 0.0}),
        ({"rewards": {"style": 1.0, "tests": -0.5}, "generation_id": "chatcmpl-1"}, {"style": 1.0, "tests": -0.5}),
        ({"judge": True}, {}),
    ],
)
def test_a_reward_is_a_number_named_parts_or_a_judgement(body: dict[str, Any], parts: dict[str, float]) -> None:
    assert SessionReward.model_validate(body).parts == parts


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"judge": False},
        {"judge": True, "reward": 1},
        {"reward": 1, "rewards": {"a": 1}},
        {"reward": float("nan")},
        {"rewards": {"": 1}},
    ],
)
def test_anything_else_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        SessionReward.model_validate(body)
