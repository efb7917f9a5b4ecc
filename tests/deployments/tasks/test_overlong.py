"""Long and cut replies: DAPO's soft penalty, and parts of `multi_reward` that do not judge cut replies."""

from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.tasks.overlong import SoftOverlongEnvironment
from rollout_env import ChatMessage, check, play
from rollout_env.environment import TaskEnvironment
from rollout_env.loading import EnvironmentNotLoadable, load_environment

OVERLONG = "deployments.tasks.overlong:SoftOverlongEnvironment"
BUFFER = {"max_tokens": 100, "buffer_tokens": 40}


def reply(tokens: int, finish_reason: Literal["stop", "length"] = "stop", content: str = "\\boxed{4}") -> ChatMessage:
    return {"role": "assistant", "content": content, "token_count": tokens, "finish_reason": finish_reason}


def penalty(tokens: int, **arguments: int) -> float:
    environment = load_environment(OVERLONG, {**BUFFER, **arguments})
    sample = {"messages": [{"role": "user", "content": "Go."}], "extra_env_info": {}}
    return play(environment, [reply(tokens)], sample).rewards["reward"]


@pytest.mark.parametrize(
    ("tokens", "reward"),
    [(0, 0.0), (60, 0.0), (61, -0.025), (70, -0.25), (80, -0.5), (99, -0.975), (100, -1), (200, -1)],
)
def test_the_penalty_grows_over_the_buffer_to_1_at_the_bound(tokens: int, reward: float) -> None:
    assert penalty(tokens) == reward


@given(st.integers(1, 50), st.integers(0, 50), st.integers(0, 150))
def test_it_is_the_punishment_of_dapo(cache: int, before: int, length: int) -> None:
    """Equation 13 of arXiv:2503.14476, with L_max and L_cache; here it reaches -1 at L_max itself."""
    longest = cache + before
    if length <= longest - cache:
        expected = 0.0
    elif length <= longest:
        expected = ((longest - cache) - length) / cache
    else:
        expected = -1.0
    assert penalty(length, max_tokens=longest, buffer_tokens=cache) == pytest.approx(expected)


def test_a_buffer_longer_than_the_bound_is_refused() -> None:
    with pytest.raises(EnvironmentNotLoadable, match="buffer_tokens must be at most max_tokens, got 101 and 100"):
        load_environment(OVERLONG, {**BUFFER, "buffer_tokens": 101})


def test_a_reply_of_unknown_length_is_not_penalized() -> None:
    assert play(SoftOverlongEnvironment(100, 40), ["a"], 0).rewards == {"reward": 0.0}


def test_it_keeps_the_rules_for_environments() -> None:
    check(lambda: SoftOverlongEnvironment(100, 40))


# As a part


def math(**fields: Any) -> dict[str, Any]:
    return {"import_path": "deployments.tasks.math:MathEnvironment", **fields}


def made(**parts: Any) -> TaskEnvironment:
    return load_environment("deployments.tasks.multi_reward:MultiRewardEnvironment", {"parts": parts})


SUM = {"messages": [{"role": "user", "content": "What is 2 + 2?"}], "extra_env_info": {"math": {"ground_truth": "4"}}}


def test_the_penalty_is_added_to_the_rewards_of_a_task_and_needs_no_fields_in_its_samples() -> None:
    environment = made(math=math(), length={"import_path": OVERLONG, "arguments": BUFFER, "weight": 0.5})
    assert play(environment, [reply(80)], SUM).rewards == {"math/correctness": 1.0, "length": -0.25}
    assert environment.ExtraEnvInfo.model_json_schema()["required"] == ["math"]


@pytest.mark.parametrize(("finish_reason", "reward"), [("stop", 2.0), ("length", 0.0)])
def test_a_part_that_does_not_judge_cut_replies_gives_them_a_reward_of_0(
    finish_reason: Literal["stop", "length"], reward: float
) -> None:
    environment = made(
        math=math(weight=2.0, judges_cut_replies=False), length={"import_path": OVERLONG, "arguments": BUFFER}
    )
    played = play(environment, [reply(80, finish_reason)], SUM)
    assert played.rewards == {"math/correctness": reward, "length": -0.5}
    assert played.terminated


def test_a_part_judges_cut_replies_unless_it_says_otherwise() -> None:
    assert play(made(math=math()), [reply(80, "length")], SUM).rewards == {"math/correctness": 1.0}
