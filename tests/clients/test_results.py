"""Readings of a rollout for a trainer: final rewards, token rows, advantages, staleness, seats."""

from dataclasses import astuple
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_client import RolloutResponse, SampleResult
from rollout_client.contract.rollouts import SampleStatus
from rollout_client.results import (
    RolloutsNotFinal,
    Staleness,
    TokenRow,
    final_reward,
    group_relative_advantages,
    is_clipped,
    last_finish_reason,
    seats_of,
    staleness,
    token_row,
)
from tests.clients.message_logs import NOT_FREE, TWO_TURNS, failed, generated, given_message, rollout
from tests.clients.scripted_service import SUMMARY, Json, result

# Final rewards


def test_a_reward_is_final_unless_the_rollout_was_cut_off() -> None:
    rewards = {name: final_reward(rollout(generated(1), reward=2.5, status=name)) for name in get_args(SampleStatus)}
    final = {"completed": 2.5, "truncated": 2.5, "max_turns": 2.5}
    assert rewards == {**dict.fromkeys(("deadline", "cancelled", "stale", "error")), **final}


def test_a_rollout_is_clipped_whose_last_response_its_length_has_cut() -> None:
    whole, cut, interrupted = (generated(1, finish_reason=reason) for reason in ("stop", "length", None))
    observed = given_message(2, role="environment")
    logs = [[cut, observed], [cut, observed, whole], [whole, cut], [cut, interrupted], [observed], []]
    assert [is_clipped(rollout(*log)) for log in logs] == [True, False, True, False, False, False]
    assert [last_finish_reason(rollout(*log)) for log in logs] == ["length", "stop", "length", None, None, None]


def test_the_error_counts_rollouts_without_final_rewards_and_explains_one() -> None:
    samples = [failed(generated(1), idx=4, generation_index=2), rollout(generated(1), status="deadline")]
    error = RolloutsNotFinal(samples, 5)
    assert error.samples == samples
    assert str(error) == (
        "2 of 5 rollouts have no final reward; idx 4 of task math, generation 2: generation error: The replica died."
    )
    assert str(RolloutsNotFinal(samples[1:], 1)).endswith("; idx 0 of task math, generation 0: deadline")


# Token rows


def test_a_row_is_the_concatenated_log_with_the_generated_tokens_marked() -> None:
    assert token_row(TWO_TURNS) == TokenRow(
        token_ids=[1, 2, 3, 4, 5, 6, 7, 8],
        loss_mask=[0, 0, 1, 1, 0, 1, 0, 0],
        generation_logprobs=[0, 0, -0.25, -0.25, 0, -1.5, 0, 0],
        weight_versions=[-1, -1, 7, 8, -1, 8, -1, -1],
        prompt_length=2,
        generated_length=6,
    )


def test_without_its_tail_a_row_ends_at_its_last_generated_token() -> None:
    *columns, prompt_length, generated_length = astuple(token_row(TWO_TURNS))
    kept = (*(column[:6] for column in columns), prompt_length, generated_length)
    assert astuple(token_row(TWO_TURNS).without_tail()) == kept


def test_a_row_without_a_generated_token_is_all_prompt() -> None:
    row = token_row(rollout(given_message(1, 2), generated(), given_message(3)))
    assert row == TokenRow([1, 2, 3], [0, 0, 0], [0, 0, 0], [-1, -1, -1], prompt_length=3, generated_length=3)
    assert row.without_tail() == row


def test_tokens_that_were_not_sampled_freely_stay_as_context() -> None:
    row = token_row(NOT_FREE).without_tail()
    assert row.token_ids == [1, 2, 3, 4, 5, 6, 7]
    assert row.loss_mask == [0, 0, 0, 1, 0, 1, 0]
    assert (row.prompt_length, row.generated_length) == (1, 7)
    assert row.part(2, 9).generated_length == 5


def test_a_span_is_of_generated_tokens_and_ends_with_its_message() -> None:
    spans: Json = {"weight_versions": [{"version": "4", "start": 1, "end": 9}]}
    row = token_row(rollout(given_message(1, 2) | spans, generated(1, 2, **spans), given_message(3)))
    assert row.weight_versions == [-1, -1, -1, 4, -1]


def test_a_generated_message_needs_one_logprob_per_token() -> None:
    with pytest.raises(ValueError, match=r"^A message has 2 token_ids and 1 generation_logprobs; there must be one"):
        token_row(rollout(generated(1, 2, generation_logprobs=[-0.5])))


# Advantages


REWARDS_AND_GROUPS = st.lists(st.tuples(st.none() | st.floats(-100, 100), st.integers(0, 2)), max_size=8)


def test_an_advantage_is_in_standard_deviations_of_its_group() -> None:
    advantages = group_relative_advantages([0, 5, 2, 7], ["a", "b", "a", "b"])
    step = 1 / (2**0.5 + 1e-4)
    assert advantages == pytest.approx([-step, -step, step, step])


@given(REWARDS_AND_GROUPS, st.booleans())
def test_a_groups_advantages_sum_to_0(rewards_and_groups: list[tuple[float | None, int]], scale_rewards: bool) -> None:
    rewards = [reward for reward, _ in rewards_and_groups]
    groups = [group for _, group in rewards_and_groups]
    advantages = group_relative_advantages(rewards, groups, scale_rewards=scale_rewards)
    for group in set(groups):
        members = [advantage for advantage, of in zip(advantages, groups, strict=True) if of == group]
        assert sum(members) == pytest.approx(0, abs=1e-8)


@given(REWARDS_AND_GROUPS, st.booleans())
def test_a_missing_reward_has_an_advantage_of_0_and_changes_no_other(
    rewards_and_groups: list[tuple[float | None, int]], scale_rewards: bool
) -> None:
    def advantages_of(kept: list[tuple[float | None, int]]) -> list[float]:
        return group_relative_advantages(
            [reward for reward, _ in kept], [group for _, group in kept], scale_rewards=scale_rewards
        )

    final = iter(advantages_of([pair for pair in rewards_and_groups if pair[0] is not None]))
    expected = [0.0 if reward is None else next(final) for reward, _ in rewards_and_groups]
    assert advantages_of(rewards_and_groups) == expected


# Staleness


def versioned(*spans: tuple[int | str, int], tokens: int | None = None) -> Json:
    """A message of spans (version, tokens)."""
    end, weight_versions = 0, []
    for version, count in spans:
        weight_versions.append({"version": str(version), "start": end, "end": end + count})
        end += count
    count = end if tokens is None else tokens
    message = {"role": "assistant", "content": "", "token_ids": [1] * count, "generation_logprobs": [-1.0] * count}
    return message | ({"weight_versions": weight_versions} if spans else {})


def played(*messages: Json) -> SampleResult:
    observation = {"role": "environment", "content": "", "token_ids": [5] * 100}
    return SampleResult.model_validate(result(message_log=[observation, *messages]))


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([versioned((7, 4))], Staleness(4, 0, oldest=7, newest=7, mean_lag=0.0, max_lag=0)),
        ([versioned((5, 1), (7, 3))], Staleness(4, 0, oldest=5, newest=7, mean_lag=0.5, max_lag=2)),
        ([versioned((4, 2)), versioned((6, 6))], Staleness(8, 0, oldest=4, newest=6, mean_lag=1.5, max_lag=3)),
        ([versioned((9, 2))], Staleness(2, 0, oldest=9, newest=9, mean_lag=-2.0, max_lag=-2)),
        ([versioned(tokens=3), versioned((6, 1))], Staleness(1, 3, oldest=6, newest=6, mean_lag=1.0, max_lag=1)),
        ([versioned((6, 0))], Staleness(0, 0)),
        ([], Staleness(0, 0)),
    ],
)
def test_each_generated_token_weighs_the_same(messages: list[Json], expected: Staleness) -> None:
    assert staleness(played(*messages), trainer_version=7) == expected


def test_only_the_tokens_of_the_named_policy_count() -> None:
    message = versioned((3, 1), ("run-a/4", 2), ("run-b/6", 4))
    assert staleness(played(message), 7) == Staleness(1, 6, oldest=3, newest=3, mean_lag=4.0, max_lag=4)
    of_run_b = Staleness(4, 3, oldest=6, newest=6, mean_lag=1.0, max_lag=1)
    assert staleness(played(message), 7, "run-b") == of_run_b
    assert staleness(played(message), 7, "run-c") == Staleness(0, 7)


def test_a_response_is_all_of_its_samples_together() -> None:
    samples = [played(versioned((7, 9))), played(versioned((4, 1)))]
    response = RolloutResponse.model_validate({**SUMMARY, "samples": samples})
    assert staleness(response, 7) == Staleness(10, 0, oldest=4, newest=7, mean_lag=0.3, max_lag=3)


# Seats


BESIDE = {"message_log": [given_message(7), generated(8)]}
SEAT = {"message_log": [given_message(1), generated(3)], "rewards": {"seat_1": -1.0}}


def test_each_seat_is_a_rollout_with_its_own_log_and_rewards() -> None:
    game = rollout(given_message(1), generated(2), rewards={"seat_0": 1.0}, reward=1.0, branches=[BESIDE, SEAT])
    first, second = seats_of(game)
    assert (first.message_log, first.rewards, first.total_reward) == (game.message_log, {"seat_0": 1.0}, 1.0)
    assert first.branches == game.branches[:1]
    assert (second.message_log, second.rewards) == (game.branches[1].message_log, {"seat_1": -1.0})
    assert (second.total_reward, second.branches, second.idx) == (-1.0, [], game.idx)


def test_a_failed_game_has_no_known_reward_in_any_seat() -> None:
    game = rollout(given_message(1), generated(2), rewards={"seat_0": 1.0}, branches=[SEAT])
    assert [seat.total_reward for seat in seats_of(game.model_copy(update={"total_reward": None}))] == [None, None]


def test_a_rollout_that_is_no_game_is_one_seat() -> None:
    alone = rollout(given_message(1), generated(2), reward=1.0, branches=[BESIDE])
    assert seats_of(alone) == [alone]
