"""Nim, an example of a game for two players."""

from hypothesis import given
from hypothesis import strategies as st

from examples.nim import Nim


def test_a_second_illegal_move_loses_the_game() -> None:
    game = Nim(0, [1, 2])
    game.move("take 2 from A")
    assert game.turn() == (0, "That is not a move that is permitted.\nHeaps: A 1, B 2. Your move.")
    game.move("I resign.")
    assert (game.turn(), game.rewards()) == (None, {0: -1.0, 1: 1.0})


@given(st.integers(min_value=0), st.lists(st.text(alphabet="take123 from ABC\n", max_size=30), max_size=40))
def test_nim_always_ends_with_one_winner(seed: int, texts: list[str]) -> None:
    game = Nim(seed)
    for text in [*texts, "", "", ""]:
        if game.turn() is not None:
            game.move(text)
    assert (game.turn(), sorted(game.rewards().values())) == (None, [-1.0, 1.0])
