"""Conversations that a scripted reward model scores."""

import pytest

from deployments.tasks.llm_judge import ModelMissing
from deployments.tasks.reward_model import RewardModelEnvironment
from rollout_env import ScriptedRewardModel, check, play

SAMPLE = {"messages": [{"role": "user", "content": "Q"}], "extra_env_info": {}}


def scored(model: ScriptedRewardModel, environment: RewardModelEnvironment | None = None) -> RewardModelEnvironment:
    made = environment or RewardModelEnvironment()
    made.use_models({}, {"helpful": model})
    return made


def test_the_score_of_the_whole_conversation_is_the_reward() -> None:
    model = ScriptedRewardModel([-2.5])
    played = play(scored(model), ["A"], SAMPLE)
    assert (played.rewards, played.terminated) == ({"score": -2.5}, True)
    assert model.asked == [[{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]]
    assert played.metrics["reward_model_seconds"] >= 0


def test_scores_can_be_scaled() -> None:
    environment = scored(ScriptedRewardModel([0.0, 1000.0, -1000.0]), RewardModelEnvironment(scaling="sigmoid"))
    assert [play(environment, ["A"], SAMPLE).total_reward for _ in range(3)] == [0.5, 1.0, 0.0]


def test_a_config_that_does_not_say_which_model_keeps_it_from_starting() -> None:
    model = ScriptedRewardModel([0.0])
    with pytest.raises(ModelMissing, match="needs one name under reward_models"):
        RewardModelEnvironment().use_models({}, {})
    with pytest.raises(ModelMissing, match="needs one name"):
        RewardModelEnvironment().use_models({}, {"a": model, "b": model})
    with pytest.raises(ModelMissing, match="needs 'c' under reward_models"):
        RewardModelEnvironment(model="c").use_models({}, {"a": model})
    RewardModelEnvironment(model="a").use_models({}, {"a": model, "b": model})


def test_it_keeps_the_rules_for_environments() -> None:
    check(lambda: scored(ScriptedRewardModel([0.5])), samples=8)
