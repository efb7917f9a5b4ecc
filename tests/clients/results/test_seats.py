"""Seats of a game as rollouts."""

from rollout_client import seats_of
from tests.clients.message_logs import generated, given_message, rollout

BESIDE = {"message_log": [given_message(7), generated(8)]}


def test_each_seat_is_a_rollout_with_its_own_log_and_rewards() -> None:
    other = {"message_log": [given_message(1), generated(3)], "rewards": {"seat_1": -1.0}}
    game = rollout(given_message(1), generated(2), rewards={"seat_0": 1.0}, reward=1.0, branches=[BESIDE, other])
    first, second = seats_of(game)
    assert (first.message_log, first.rewards, first.total_reward) == (game.message_log, {"seat_0": 1.0}, 1.0)
    assert first.branches == game.branches[:1]
    assert (second.message_log, second.rewards) == (game.branches[1].message_log, {"seat_1": -1.0})
    assert (second.total_reward, second.branches, second.idx) == (-1.0, [], game.idx)


def test_a_failed_game_has_no_known_reward_in_any_seat() -> None:
    other = {"message_log": [given_message(1), generated(3)], "rewards": {"seat_1": -1.0}}
    game = rollout(given_message(1), generated(2), rewards={"seat_0": 1.0}, branches=[other])
    assert [seat.total_reward for seat in seats_of(game.model_copy(update={"total_reward": None}))] == [None, None]


def test_a_rollout_that_is_no_game_is_one_seat() -> None:
    alone = rollout(given_message(1), generated(2), reward=1.0, branches=[BESIDE])
    assert seats_of(alone) == [alone]
