"""The sliding puzzle: its boards, its rules and what it says of bad states."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from deployments.tasks.sliding_puzzle import SlidingPuzzleEnvironment, SlidingPuzzleState, _shuffled_board, solved_board
from rollout_env import SampleRejected, StepOutcome, check, play

ONE_LEFT_TO_GO = [[1, 2], [0, 3]]
shuffles = st.tuples(st.integers(2, 5), st.integers(0, 2**63 - 1), st.integers(1, 60))


def outcome_of(response: str, **state: Any) -> StepOutcome:
    """The outcome of one move in the game that `state` describes."""
    sample = {"messages": [{"role": "user", "content": "Play."}], "extra_env_info": state}
    [outcome] = play(SlidingPuzzleEnvironment(), [response], sample).outcomes
    return outcome


def state_of(board: list[list[int]], moves: int = 0, illegal_moves: int = 0, max_moves: int = 20) -> dict[str, Any]:
    return {"board": board, "moves": moves, "illegal_moves": illegal_moves, "max_moves": max_moves}


@pytest.mark.parametrize(
    ("response", "answer"),
    [("<action>left</action>", "left"), ("<action>down</action> no, <action> LEFT </action> and <action>up", "left")],
)
def test_the_last_complete_action_may_solve_the_board_with_the_last_move(response: str, answer: str) -> None:
    assert outcome_of(response, board=ONE_LEFT_TO_GO, moves=2, max_moves=3) == StepOutcome(
        observation={"role": "user", "content": "Solved in 3 moves."},
        reward=1.0,
        terminated=True,
        metadata=state_of([[1, 2], [3, 0]], moves=3, max_moves=3),
        answer=answer,
    )


@pytest.mark.parametrize(
    ("response", "sentence", "answer"),
    [
        ("<action>up</action>", "Illegal move: up.", "up"),
        ("<action>jump</action>", "Unknown action: jump.", "jump"),
        ("<action>" + "x" * 100 + "</action>", "Unknown action: " + "x" * 20 + ".", "x" * 100),
        ("left", "No action found.", None),
        ("<action>left", "No action found.", None),
    ],
)
def test_what_is_no_move_is_counted_and_answered_with_the_board(response: str, sentence: str, answer: str) -> None:
    assert outcome_of(response, board=ONE_LEFT_TO_GO) == StepOutcome(
        observation={"role": "user", "content": f"{sentence}\n1 2\n_ 3"},
        reward=0.0,
        terminated=False,
        metadata=state_of(ONE_LEFT_TO_GO, illegal_moves=1),
        answer=answer,
    )


@pytest.mark.parametrize("response", ["<action>right</action>", "<action>down</action>", "nothing"])
def test_legal_and_illegal_moves_together_use_up_the_game(response: str) -> None:
    outcome = outcome_of(response, board=ONE_LEFT_TO_GO, moves=2, illegal_moves=1, max_moves=4)
    assert (outcome.reward, outcome.terminated, outcome.observations[0]["content"]) == (0.0, True, "No moves left.")


@pytest.mark.parametrize(
    ("state", "complaint"),
    [
        ({"board": [[1, 2], [3, 0, 4]]}, "board must be a square"),
        ({"board": [[1, 2], [2, 0]]}, r"board must be a square that holds each of 0\.\.3 once"),
        ({"board": [[0]]}, r"board\.0\n  List should have at least 2 items"),
        ({"board": ONE_LEFT_TO_GO, "max_move": 3}, r"max_move\n  Extra inputs are not permitted"),
    ],
)
def test_a_state_that_is_no_game_is_refused_by_the_name_of_its_field(state: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValidationError, match=complaint):
        SlidingPuzzleState(**state)


def test_a_game_is_played_move_by_move_until_it_is_solved() -> None:
    sample = {"messages": [{"role": "user", "content": "Play."}], "extra_env_info": {"board": [[1, 0], [3, 2]]}}
    replies = [f"<action>{name}</action>" for name in ("right", "up", "down", "view", "no", "left", "up", "up")]
    played = play(SlidingPuzzleEnvironment(), replies, sample)
    moved = ["_ 1\n3 2", "3 1\n_ 2", "_ 1\n3 2"]
    shown = [*moved, "_ 1\n3 2", "Unknown action: no.\n_ 1\n3 2", "1 _\n3 2", "Solved in 5 moves."]
    assert [message["content"] for message in played.message_log[2::2]] == shown
    assert [outcome.reward for outcome in played.outcomes] == [0.0] * 6 + [1.0]
    assert (played.terminated, played.answers[:3]) == (True, ["right", "up", "down"])
    assert played.unused_replies == ["<action>up</action>"]
    assert played.extra_env_info == state_of([[1, 2], [3, 0]], moves=5, illegal_moves=1)


def test_it_keeps_the_rules_for_environments() -> None:
    check(SlidingPuzzleEnvironment, replies=["<action>up</action>", "<action>left</action>", "<action>view</action>"])


def test_a_game_that_is_over_takes_no_further_move() -> None:
    with pytest.raises(SampleRejected, match="The game is over"):
        outcome_of("<action>down</action>", board=solved_board(2))
    with pytest.raises(SampleRejected, match="The game is over"):
        outcome_of("<action>left</action>", board=ONE_LEFT_TO_GO, moves=3, illegal_moves=1, max_moves=4)


@given(shuffles)
def test_a_shuffled_board_is_repeatable_and_not_solved(shuffle: tuple[int, int, int]) -> None:
    board = _shuffled_board(*shuffle)
    assert board == _shuffled_board(*shuffle)
    assert board != solved_board(shuffle[0])
    assert SlidingPuzzleState(board=board).board == board


@given(st.integers(2, 5), st.integers(0, 1000))
def test_a_board_with_two_tiles_swapped_is_refused(size: int, seed: int) -> None:
    board = _shuffled_board(size, seed, 30)
    row = next(index for index, tiles in enumerate(board) if 0 not in tiles)
    board[row][0], board[row][1] = board[row][1], board[row][0]
    with pytest.raises(ValidationError, match=r"board cannot be solved by legal moves: \[\["):
        SlidingPuzzleState(board=board)
