"""Sliding puzzles: numbered tiles in a square with one empty place. Each turn is one move."""

import random
from collections import deque
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, field_validator

from deployments.tasks.replies import last_tagged, text_outcome
from rollout_env import ChatMessage, Reference, SampleRejected, StepOutcome, TaskEnvironment

Board = list[list[int]]
"""Rows of tile numbers, 0 the empty place; a permutation of 0..n²-1."""

Direction = Literal["up", "down", "left", "right"]
"""Direction in which a tile slides into the empty place."""

DIRECTIONS: tuple[Direction, ...] = get_args(Direction)
_TILE_BESIDE_EMPTY: dict[Direction, tuple[int, int]] = {"up": (1, 0), "down": (-1, 0), "left": (0, 1), "right": (0, -1)}
_OPPOSITE: dict[Direction, Direction] = {"up": "down", "down": "up", "left": "right", "right": "left"}
_LONGEST_QUOTED_ACTION = 20


def solved_board(size: int) -> Board:
    """The goal: tiles 1 to size²-1 in reading order, the empty place last."""
    numbers = [*range(1, size * size), 0]
    return [numbers[start : start + size] for start in range(0, size * size, size)]


def _board_text(board: Board) -> str:
    """The board as text: one line per row, numbers right-aligned to the widest, `_` for the empty place."""
    width = len(str(len(board) ** 2 - 1))
    return "\n".join(" ".join(str(tile or "_").rjust(width) for tile in row) for row in board)


def _puzzle_prompt(board: Board) -> str:
    """The prompt of a game: the goal, how to move, the board."""
    return (
        f"Slide the tiles into order:\n{_board_text(solved_board(len(board)))}\n"
        f"Answer with <action>up</action>, down, left or right.\n{_board_text(board)}"
    )


def _slide(board: Board, direction: Direction) -> Board | None:
    """The board after a tile slid in `direction` into the empty place; `None` if no tile can."""
    row, column = next((r, c) for r, tiles in enumerate(board) for c, tile in enumerate(tiles) if tile == 0)
    tile_row, tile_column = row + _TILE_BESIDE_EMPTY[direction][0], column + _TILE_BESIDE_EMPTY[direction][1]
    if not (0 <= tile_row < len(board) and 0 <= tile_column < len(board)):
        return None
    after = [list(tiles) for tiles in board]
    after[row][column], after[tile_row][tile_column] = after[tile_row][tile_column], 0
    return after


def _shuffled_board(size: int, seed: int, shuffle_moves: int) -> Board:
    """Makes `shuffle_moves` random legal moves from the solved board, none of which undoes the one before.

    Makes further moves while the board is the solved one. Equal arguments give equal boards.
    """
    draw = random.Random(seed)
    goal = solved_board(size)
    board, played = goal, 0
    last: Direction | None = None
    while played < shuffle_moves or board == goal:
        backward = _OPPOSITE[last] if last else None
        reachable = {d: after for d in DIRECTIONS if d != backward and (after := _slide(board, d)) is not None}
        last, board = draw.choice(list(reachable.items()))
        played += 1
    return board


def _is_solvable(board: Board) -> bool:
    """Whether legal moves lead to the solved board, as they do from half of all permutations.

    A move along a row changes no inversion, one between rows an even number of them if the rows are of odd length.
    """
    size, tiles = len(board), [tile for row in board for tile in row if tile]
    inversions = sum(later < tile for place, tile in enumerate(tiles) for later in tiles[place + 1 :])
    rows_below = next(index for index, row in enumerate(reversed(board)) if 0 in row)
    return (inversions + (size - 1) * rows_below) % 2 == 0


class SlidingPuzzleState(BaseModel):
    """A game: its board and the moves so far."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    board: list[Annotated[list[int], Field(min_length=2, max_length=5)]] = Field(min_length=2, max_length=5)
    """The rows, from 2x2 to 5x5; 0 is the empty place. Moves must lead to the solved board."""
    moves: int = Field(default=0, ge=0)
    """Legal moves so far."""
    illegal_moves: int = Field(default=0, ge=0)
    """Replies so far without a legal move."""
    max_moves: int = Field(default=20, ge=1)
    """The game is lost when `moves` and `illegal_moves` together reach this number."""

    @field_validator("board")
    @classmethod
    def _is_playable(cls, board: Board) -> Board:
        size, tiles = len(board), sorted(tile for row in board for tile in row)
        if any(len(row) != size for row in board) or tiles != list(range(size**2)):
            raise ValueError(f"board must be a square that holds each of 0..{size**2 - 1} once, got {board}")
        if not _is_solvable(board):
            raise ValueError(f"board cannot be solved by legal moves: {board}")
        return board


class SlidingPuzzleEnvironment(TaskEnvironment):
    """One move per turn, in an `<action>` tag. The move that solves the board has reward 1.0, all others 0.0."""

    description: ClassVar[str] = "Slide numbered tiles into order, one move a turn; reward 1 when solved."
    ExtraEnvInfo: ClassVar[type[BaseModel]] = SlidingPuzzleState

    async def step(self, message_log: list[ChatMessage], extra_env_info: SlidingPuzzleState) -> StepOutcome:
        """Plays the last complete `<action>` of the response: a direction, or `view`, which shows the board for free.

        Raises:
            SampleRejected: the game is over already.
        """
        board = extra_env_info.board
        if board == solved_board(len(board)) or _moves_left(extra_env_info) <= 0:
            raise SampleRejected("The game is over.")
        found = last_tagged(message_log[-1]["content"], "action")
        action = None if found is None else found.lower()
        if action == "view":
            return _outcome(extra_env_info, board, _board_text(board), answer=action)
        direction = next((d for d in DIRECTIONS if d == action), None)
        after = _slide(board, direction) if direction else None
        if after is None:
            illegal = extra_env_info.model_copy(update={"illegal_moves": extra_env_info.illegal_moves + 1})
            return _outcome(illegal, board, f"{_complaint(action)}\n{_board_text(board)}", answer=action)
        legal = extra_env_info.model_copy(update={"moves": extra_env_info.moves + 1})
        return _outcome(legal, after, _board_text(after), answer=action)

    def reference(self, sample: Mapping[str, Any]) -> Reference:
        """The shortest way to the solved board, where the board is one of 2x2 or 3x3."""
        board = sample["extra_env_info"]["board"]
        return Reference([f"<action>{move}</action>" for move in _shortest_way(board)] if len(board) <= 3 else None)

    def example_samples(self, count: int, seed: int) -> list[dict[str, Any]]:
        """2x2 games, 1 to 6 moves from solved, each with a shuffle seed of its own."""
        draw = random.Random(seed)
        return [_game_sample(2, shuffle_seed, draw.randint(1, 6)) for shuffle_seed in draw.sample(range(2**31), count)]


def _game_sample(size: int, seed: int, shuffle_moves: int) -> dict[str, Any]:
    """A new game as a sample of a rollout request, made by random moves from the solved board."""
    board = _shuffled_board(size, seed, shuffle_moves)
    return {"messages": [{"role": "user", "content": _puzzle_prompt(board)}], "extra_env_info": {"board": board}}


def _shortest_way(board: Board) -> list[Direction]:
    """The moves to the solved board, by breadth-first search."""
    goal, waiting, seen = solved_board(len(board)), deque([(board, list[Direction]())]), {str(board)}
    while True:
        there, way = waiting.popleft()
        if there == goal:
            return way
        for direction in DIRECTIONS:
            after = _slide(there, direction)
            if after is not None and str(after) not in seen:
                seen.add(str(after))
                waiting.append((after, [*way, direction]))


def _moves_left(state: SlidingPuzzleState) -> int:
    return state.max_moves - state.moves - state.illegal_moves


def _complaint(action: str | None) -> str:
    """The reason why an action is illegal: it is missing, not a direction, or no tile can slide there."""
    if action is None:
        return "No action found."
    if action in DIRECTIONS:
        return f"Illegal move: {action}."
    return f"Unknown action: {action[:_LONGEST_QUOTED_ACTION]}."


def _outcome(state: SlidingPuzzleState, board: Board, observation: str, answer: str | None) -> StepOutcome:
    """The outcome for `board` and the counts of `state`. If the game is over, the observation says so instead."""
    solved = board == solved_board(len(board))
    lost = not solved and _moves_left(state) <= 0
    if solved:
        observation = f"Solved in {state.moves} move{'' if state.moves == 1 else 's'}."
    elif lost:
        observation = "No moves left."
    return text_outcome(
        observation,
        1.0 if solved else 0.0,
        terminated=solved or lost,
        metadata={**state.model_dump(), "board": board},
        answer=answer,
    )
