"""The reward is the one that NeMo-RL's environment of the same name gives."""

import pytest

from deployments.tasks.code_jaccard import CodeJaccardEnvironment, similarity
from rollout_env import check, play


@pytest.mark.parametrize(
    ("reply", "reference", "score"),
    [
        ("return x", "return x", 1.0),
        (" Return X\n", "return x", 1.0),
        ("a b c", "a b d", 0.5),
        ("a b", "a b c d", 0.5 * 3 / 7),
        ("a a a", "a", 1.0 / 5),
        ("nothing alike", "return x", 0.0),
        ("", "return x", 0.0),
        ("return x", "", 0.0),
        ("", "", 1.0),
    ],
)
def test_the_score_is_the_overlap_of_words_times_the_ratio_of_lengths(reply: str, reference: str, score: float) -> None:
    assert similarity(reply, reference) == pytest.approx(score)


def test_a_rollout_has_one_turn() -> None:
    sample = {"messages": [{"role": "user", "content": "?"}], "extra_env_info": {"ground_truth": "a b d"}}
    played = play(CodeJaccardEnvironment(), ["a b c"], sample)
    assert (played.total_reward, played.terminated, played.answers) == (0.5, True, ["a b c"])
    assert played.message_log[-1]["content"] == "Environment: jaccard misaligned (score: 0.50)"


def test_it_keeps_the_rules_for_environments() -> None:
    check(CodeJaccardEnvironment)
