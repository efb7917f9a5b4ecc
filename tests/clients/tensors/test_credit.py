"""Credit by turn: exact advantages of turns, and the laws that hold whatever the rewards are."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_client import SampleResult
from rollout_client.tensors import to_tensors, turn_advantages
from tests.clients.message_logs import GREEDY, failed, generated, given_message, rollout
from tests.clients.scripted_service import Json, result

PAD = 99
EPSILON = 1e-4
METRICS = result()["metrics"]


def played(*message_log: Json, turns: int | None = None, **fields: Any) -> SampleResult:
    """A rollout whose total is of `turns` turns: by default of all in its log."""
    count = sum("generation_logprobs" in message for message in message_log)
    total = sum(message.get("reward") or 0.0 for message in message_log)
    metrics = METRICS | {"turn_count": count if turns is None else turns}
    return rollout(*message_log, **({"reward": total, "metrics": metrics} | fields))


def turns(*rewards: float | None, **fields: Any) -> SampleResult:
    """A rollout with a prompt of one token, responses of one token each, and an observation after each."""
    log = [given_message(1)]
    for reward in rewards:
        log += [generated(2, reward=reward), given_message(3, role="environment")]
    return played(*log, **fields)


def of_turns(samples: Sequence[SampleResult], **options: Any) -> list[list[float]]:
    """The advantages at the responses of `turns`, by rollout."""
    given: dict[str, Any] = {"credit": "turn", "scale_rewards": False, **options}
    tensors = to_tensors(samples, pad_token_id=PAD, **given)
    return [row[mask.bool()].tolist() for row, mask in zip(tensors.advantages, tensors.loss_mask, strict=True)]


# The advantages of turns


def test_a_turn_has_the_rewards_from_it_on_against_all_turns_of_its_group() -> None:
    # The returns are 6, 5, 3 and 0, 2, with the mean 3.2.
    assert of_turns([turns(1, 2, 3), turns(-2, 2)]) == [pytest.approx([2.8, 1.8, -0.2]), pytest.approx([-3.2, -1.2])]


@pytest.mark.parametrize(("discount", "advantages"), [(0.5, [[0, -1, 1]]), (0.0, [[-2 / 3, -8 / 3, 10 / 3]])])
def test_rewards_ahead_are_discounted_once_for_each_turn(discount: float, advantages: list[list[float]]) -> None:
    """With 0.5 the returns are 4 + 0.5 * (2 + 0.5 * 8) = 7, 6 and 8, with the mean 7."""
    assert of_turns([turns(4, 2, 8)], discount=discount) == [pytest.approx(each) for each in advantages]


def test_the_deviation_is_that_of_the_returns_of_all_turns() -> None:
    # The returns are 3, 1 and 2, 0; their deviation with n - 1 is the root of 5 / 3.
    scale = (5 / 3) ** 0.5 + EPSILON
    assert of_turns([turns(2, 1), turns(2, 0)], scale_rewards=True) == [
        pytest.approx([1.5 / scale, -0.5 / scale]),
        pytest.approx([0.5 / scale, -1.5 / scale]),
    ]


def test_only_the_tokens_of_a_response_have_the_advantage_of_its_turn() -> None:
    first = played(given_message(1, 1), generated(2, 3, reward=1.0), given_message(4), generated(5, 6, 7, reward=3.0))
    options: dict[str, Any] = {"pad_token_id": PAD, "credit": "turn", "scale_rewards": False, "pad_to_multiple_of": 5}
    assert to_tensors([first], **options).advantages.tolist() == [[0, 0, 0.5, 0.5, 0, -0.5, -0.5, -0.5, 0, 0]]
    left = to_tensors([first], **options, padding_side="left")
    assert left.advantages.tolist() == [[0, 0, 0, 0, 0.5, 0.5, 0, -0.5, -0.5, -0.5]]


# The rewards of turns


def credited(samples: Sequence[SampleResult], **options: Any) -> list[list[float]]:
    """The rewards of turns that a credit function gets of one group."""
    got: list[list[float]] = []

    def note(rewards: Sequence[Sequence[float]]) -> Sequence[Sequence[float]]:
        got.extend(list(each) for each in rewards)
        return rewards

    to_tensors(samples, pad_token_id=PAD, credit=note, **options)
    return got


@pytest.mark.parametrize(
    ("sample", "rewards"),
    [
        (turns(1, None, 2), [1, 0, 2]),
        # The reward of a whole session, or that which an agent returns.
        (turns(1, 2, reward=10.0), [1, 9]),
        (turns(None, None, reward=3.0), [0, 3]),
        # The total of a rollout that was continued from a posted log is of its last turns alone.
        (turns(5, 6, 1, turns=1, reward=1.0), [5, 6, 1]),
        (played(given_message(1), reward=0.0), []),
        (played(given_message(1), generated(reward=4.0), given_message(2), generated(3, reward=2.0)), [4, 2]),
    ],
)
def test_a_turn_has_the_reward_of_its_message_and_the_last_the_rest(sample: SampleResult, rewards: list[float]) -> None:
    assert credited([sample]) == [rewards]


def test_the_reward_of_an_observation_is_of_the_turn_before_it() -> None:
    """That of a prompt is of none."""
    log = [
        given_message(1) | {"reward": 8.0},
        generated(2, reward=1.0),
        given_message(3) | {"reward": 0.5},
        generated(4, reward=2.0),
    ]
    assert credited([turns(1, turns=0), played(*log, turns=0)]) == [[1], [1.5, 2]]


# Rollouts without a final reward


@pytest.mark.parametrize(
    "without", [failed(generated(8, reward=9.0)), turns(9, 9, status="deadline")], ids=["error", "deadline"]
)
def test_the_turns_of_a_rollout_without_a_final_reward_are_in_no_statistic(without: SampleResult) -> None:
    samples = [without, turns(0), turns(2)]
    assert of_turns(samples) == [[-1], [1]]
    masked = to_tensors(samples, pad_token_id=PAD, credit="turn", scale_rewards=False, not_final="mask")
    assert masked.advantages[0].tolist() == [0] * masked.advantages.shape[1]
    assert masked.advantages[1:, 1].tolist() == [-1, 1]


# Functions


def test_a_function_turns_the_rewards_of_a_group_into_advantages() -> None:
    groups: list[list[list[float]]] = []

    def negated(rewards: Sequence[Sequence[float]]) -> Sequence[Sequence[float]]:
        groups.append([list(each) for each in rewards])
        return [[-reward for reward in each] for each in rewards]

    assert of_turns([turns(1, 2), turns(5, idx=1), turns(3)], credit=negated) == [[-1, -2], [-5], [-3]]
    assert groups == [[[1, 2], [3]], [[5]]]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"credit": lambda _: [[1.0]]}, "must return one advantage for each turn"),
        ({"discount": -0.1}, "discount must be between 0 and 1, and it is -0.1"),
        ({"discount": 1.1}, "discount must be between 0 and 1, and it is 1.1"),
    ],
)
def test_too_few_advantages_and_discounts_outside_of_0_to_1_are_refused(options: Json, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        of_turns([turns(1, 2)], **options)


# What the policy did not sample freely


def test_an_untrainable_response_earns_for_the_turn_before_or_the_first() -> None:
    forced: Json = {"constrained": True}
    log = [
        given_message(1),
        generated(2, reward=1, **forced),
        generated(3, reward=2),
        generated(4, reward=4, **GREEDY),
        generated(5, reward=8),
    ]
    samples = [played(*log, reward=31.0), played(given_message(1), generated(2, **forced))]
    assert credited(samples) == [[7, 24], []]
    tensors = to_tensors(samples, pad_token_id=PAD, credit=lambda _: [[-1.0, -1.0], []])
    assert tensors.advantages.tolist() == [[0, 0, -1, 0, -1], [0, 0, 0, 0, 0]]


# Laws

rewards_of_turns = st.lists(st.lists(st.floats(-9, 9), min_size=1, max_size=4), min_size=1, max_size=4)


@given(st.lists(st.floats(-9, 9), min_size=1, max_size=6), st.booleans(), st.floats(0, 1))
def test_of_one_turn_the_credit_is_of_the_total(rewards: list[float], scale_rewards: bool, discount: float) -> None:
    samples = [turns(reward, idx=place % 2) for place, reward in enumerate(rewards)]
    by_total = to_tensors(samples, pad_token_id=PAD, scale_rewards=scale_rewards).advantages
    by_turn = to_tensors(samples, pad_token_id=PAD, scale_rewards=scale_rewards, credit="turn", discount=discount)
    assert by_turn.advantages[:, 1].tolist() == pytest.approx(by_total.tolist(), abs=1e-5)


@given(rewards_of_turns, st.booleans(), st.floats(0, 1))
def test_the_advantages_of_a_group_sum_to_0(rewards: list[list[float]], scale_rewards: bool, discount: float) -> None:
    advantages = turn_advantages(rewards, discount=discount, scale_rewards=scale_rewards)
    assert [len(each) for each in advantages] == [len(each) for each in rewards]
    assert sum(sum(each) for each in advantages) == pytest.approx(0, abs=1e-6)
