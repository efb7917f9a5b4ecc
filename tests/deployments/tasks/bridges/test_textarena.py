"""The bridge to TextArena, over the real games."""

import random
from typing import Any

import pytest

from deployments.tasks.bridges.textarena import SeatedGame, TextArenaEnvironment, _TextArenaInfo, listed_move
from rollout_env import SampleRejected, check, play

SINGLE = [f"{game}-v0" for game in ("GuessTheNumber", "TowerOfHanoi", "Sudoku", "2048", "LightsOut", "Mastermind")]
TWO_PLAYER = ["TicTacToe-v0", "Nim-v0", "ConnectFour-v0", "KuhnPoker-v0", "IteratedPrisonersDilemma-v0", "Othello-v0"]


def sample(seed: int = 1, **fields: Any) -> dict[str, Any]:
    return {"extra_env_info": {"seed": seed, **fields}}


def next_move(seen: str, _numbers: random.Random) -> str:
    """An opponent by import path."""
    return next(f"[{cell}]" for cell in (3, 4, 5) if f"'[{cell}]'" in seen)


def test_a_puzzle_for_one_is_solved() -> None:
    solution = ["[A C]", "[A B]", "[C B]", "[A C]", "[B A]", "[B C]", "[A C]"]
    played = play(TextArenaEnvironment("TowerOfHanoi-v0"), solution, sample())
    assert "You have to move the disks from tower A to tower C." in played.message_log[0]["content"]
    assert (played.total_reward, played.terminated, len(played.turns)) == (1.0, True, 7)


def test_a_game_against_a_function_is_won_and_lost() -> None:
    environment = TextArenaEnvironment("TicTacToe-v0", players=2, opponent=f"{__name__}:next_move")
    won = play(environment, ["[0]", "[1]", "[2]"], sample())
    assert (won.total_reward, won.terminated, len(won.turns)) == (1.0, True, 3)
    lost = play(environment, ["[0]", "[1]", "[8]"], sample())
    assert (lost.total_reward, lost.terminated) == (-1.0, True)
    assert "[Player 1] [3]" in won.message_log[2]["content"]
    assert "[Player 0]" not in won.message_log[2]["content"]


def test_the_policy_may_be_the_second_player() -> None:
    environment = TextArenaEnvironment("TicTacToe-v0", players=2, opponent=f"{__name__}:next_move")
    played = play(environment, ["[0]", "[1]"], sample(player=1))
    assert "You are Player 1" in played.message_log[0]["content"]
    assert "[Player 0] [3]" in played.message_log[0]["content"]
    assert "[Player 0] [4]" in played.message_log[2]["content"]
    assert (played.total_reward, played.terminated) == (-1.0, True)


def test_each_player_may_be_another_party_and_sees_the_moves_of_the_others() -> None:
    game = SeatedGame(1, "TicTacToe-v0")
    seats = []
    for move in ["[0]", "[3]", "[1]", "[4]", "[2]"]:
        turn = game.turn()
        assert turn is not None
        seats.append(turn)
        game.move(move)
    assert [seat for seat, _ in seats] == [0, 1, 0, 1, 0]
    assert seats[0][1].startswith("[GAME] You are Player 0 in Tic Tac Toe.")
    assert "[Player 0] [0]" in seats[1][1]
    assert "[Player 1] [3]" in seats[2][1]
    assert "[Player 0]" not in seats[2][1]
    assert (game.turn(), game.rewards()) == (None, {0: 1.0, 1: -1.0})


def test_an_illegal_move_is_told_and_a_second_one_loses() -> None:
    environment = TextArenaEnvironment("TicTacToe-v0", players=2)
    played = play(environment, ["I resign", "[99]"], sample())
    assert "Player 0" in played.message_log[2]["content"]
    assert not played.turns[0].outcome.terminated
    assert (played.total_reward, played.terminated) == (-1.0, True)


@pytest.mark.parametrize("game", TWO_PLAYER)
def test_a_random_opponent_plays_every_game_and_a_seed_repeats_it(game: str) -> None:
    environment = TextArenaEnvironment(game, players=2)
    numbers = random.Random(4)
    replies: list[str] = []
    log = play(environment, [], sample(4)).message_log
    while len(replies) < 60:
        replies.append(listed_move(log[-1]["content"], numbers))
        played = play(environment, replies, sample(4))
        log = played.message_log
        if played.terminated:
            break
    assert played.terminated
    assert play(environment, replies, sample(4)) == played


@pytest.mark.parametrize("game", SINGLE)
def test_a_seed_makes_the_same_game_whichever_games_are_played_beside_it(game: str) -> None:
    environment = TextArenaEnvironment(game)
    first = [environment.start([], _TextArenaInfo(seed=seed)).observation for seed in range(3)]
    again = [environment.start([], _TextArenaInfo(seed=seed)).observation for seed in reversed(range(3))]
    assert first == again[::-1]
    random.seed(0)
    before = random.getstate()
    environment.start([], _TextArenaInfo(seed=1))
    assert random.getstate() == before


def test_a_session_that_is_opened_again_stands_where_the_first_stood() -> None:
    environment = TextArenaEnvironment("ConnectFour-v0", players=2)
    played = play(environment, ["[col 3]", "[col 2]", "[col 1]"], sample(9))
    log, info = played.message_log, _TextArenaInfo.model_validate(played.extra_env_info)
    session = environment.open_session(log[:-2], info)
    assert session.step(log[:-1], info) == played.outcomes[-1]


def test_games_that_cannot_be_played_are_refused() -> None:
    with pytest.raises(ValueError, match="the game Nope-v0 cannot be begun with 1 players"):
        TextArenaEnvironment("Nope-v0")
    with pytest.raises(ValueError, match="the game TicTacToe-v0 cannot be begun with 1 players"):
        TextArenaEnvironment("TicTacToe-v0")
    with pytest.raises(SampleRejected, match="TicTacToe-v0 has 2 players, from 0"):
        play(TextArenaEnvironment("TicTacToe-v0", players=2), [], sample(player=2))


def test_it_keeps_the_rules_for_environments() -> None:
    check(lambda: TextArenaEnvironment("GuessTheNumber-v0"), replies=["[3]", "[10]"], samples=2, max_block_s=30)
    game = TextArenaEnvironment("TicTacToe-v0", players=2)
    check(lambda: game, replies=["[3]", "[0]", "[1]"], samples=3, max_block_s=30)
