"""The task `shapes`: questions about pictures, for models that see. The pictures are drawn here, each from a seed.

The kinds of samples:

- `count`: how many shapes of one color and form there are. One turn.
- `maze`: the way to the exit, one move a turn. The maze is shown again after each move.
"""

import random
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

from deployments.tasks.replies import boxed_or_whole, text_outcome
from deployments.tasks.shapes_pictures import STEPS, Cell, Maze, Scene, maze, maze_picture, scene, scene_picture
from rollout_env import ChatMessage, StartOutcome, StepOutcome, TaskEnvironment, reply_text

Kind = Literal["count", "maze"]
KINDS: tuple[Kind, ...] = get_args(Kind)
MAZE_PROMPT = "Bring the red dot to the green exit. Answer with one move: up, down, left or right."
SEEDS = 2**31
_LONGEST_QUOTE = 20


class ShapesInfo(BaseModel):
    """A question about a picture, and in a maze the moves so far."""

    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)

    kind: Kind
    """The question: how many shapes there are, or the next move in a maze."""
    seed: int = Field(ge=0, lt=2**63)
    """Seed of the picture, and of the question."""
    size: int = Field(default=64, ge=48, le=1024)
    """Pixels of each side of the picture."""
    most_counted: int = Field(default=6, ge=1, le=9)
    """`count`: the largest answer. Each from 0 on is as likely."""
    most_others: int = Field(default=6, ge=0, le=7)
    """`count`: how many shapes of other colors and forms there are at most."""
    cells: int = Field(default=4, ge=2, le=8)
    """`maze`: cells in a row of the maze, and rows."""
    max_moves: int | None = Field(default=None, ge=1, le=1000)
    """`maze`: how many replies may be moves; by default twice those of the shortest way from the start."""
    moves: int = Field(default=0, ge=0)
    """`maze`: replies so far."""
    place: list[int] | None = Field(default=None, min_length=2, max_length=2)
    """`maze`: row and column of the dot, from 0; by default where the seed puts it."""

    @model_validator(mode="after")
    def _is_unfinished(self) -> Self:
        if self.kind == "maze" and (self.cell == self.maze.exit or self.moves >= self.moves_allowed):
            raise ValueError(f"the maze is over: place is {list(self.cell)} after {self.moves} moves")
        return self

    @property
    def scene(self) -> Scene:
        return scene(self.seed, self.size, self.most_counted, self.most_others)

    @property
    def maze(self) -> Maze:
        return maze(self.seed, self.cells)

    @property
    def cell(self) -> Cell:
        """Where the dot is in the maze."""
        return self.maze.start if self.place is None else (self.place[0], self.place[1])

    @property
    def moves_allowed(self) -> int:
        shown = self.maze
        return 2 * len(shown.shortest_way(shown.start)) if self.max_moves is None else self.max_moves


class ShapesEnvironment(TaskEnvironment):
    """Questions about pictures that it draws. A right answer, and the move to a maze's exit, have reward 1, others 0.

    A start shows the picture with the question, so samples need no `messages`.
    """

    description: ClassVar[str] = "Count shapes, find through a maze: questions about pictures."
    ExtraEnvInfo: ClassVar[type[BaseModel]] = ShapesInfo

    def __init__(self, kinds: Sequence[Kind] = KINDS) -> None:
        """Chooses the example samples.

        Args:
            kinds: their kinds, in turn.

        Raises:
            ValueError: there are no kinds.
        """
        if not kinds:
            raise ValueError(f"kinds must name at least one of {', '.join(KINDS)}")
        self.kinds = tuple(kinds)

    def start(self, message_log: list[ChatMessage], extra_env_info: ShapesInfo) -> StartOutcome:  # noqa: ARG002
        """Shows the picture and asks."""
        state = extra_env_info
        if state.kind == "count":
            shown = state.scene
            picture = scene_picture(shown, state.size)
            question = f"How many {shown.color} {shown.form}s are there? Answer with one digit."
        else:
            picture, question = maze_picture(state.maze, state.cell, state.size), MAZE_PROMPT
        return StartOutcome(observation={"role": "user", "content": question, "images": [picture]})

    def step(self, message_log: list[ChatMessage], extra_env_info: ShapesInfo) -> StepOutcome:
        """Judges the digit, or makes the move, that is in the reply's last box, or that the reply consists of."""
        answer = boxed_or_whole(reply_text(message_log[-1]))
        if extra_env_info.kind == "maze":
            return _moved(extra_env_info, answer.lower())
        return _judged(answer, extra_env_info.scene.count)

    def example_samples(self, count: int, seed: int) -> list[dict[str, Any]]:
        """Samples of the kinds in turn, of the default difficulty, each with a seed of its own."""
        seeds = random.Random(seed).sample(range(SEEDS), count)
        return [
            {"extra_env_info": {"kind": self.kinds[place % len(self.kinds)], "seed": picture_seed}}
            for place, picture_seed in enumerate(seeds)
        ]


def _judged(answer: str, expected: int) -> StepOutcome:
    if answer not in tuple("0123456789"):
        text = f"Environment: the reply is not one digit. Expected {expected}."
        return text_outcome(text, terminated=True)
    right = int(answer) == expected
    text = "Environment: correct" if right else f"Environment: incorrect. Expected {expected}."
    return text_outcome(text, float(right), terminated=True, answer=answer)


def _moved(state: ShapesInfo, answer: str) -> StepOutcome:
    """The outcome of a reply in a maze. One that is not a move, or runs into a wall, is counted and moves nothing."""
    shown, place = state.maze, state.cell
    direction = next((each for each in STEPS if each == answer), None)
    after = shown.after(place, direction) if direction else None
    if direction is None:
        text = f"{answer[:_LONGEST_QUOTE]!a} is not a move. Next move?"
    else:
        text = "Next move?" if after else "There is a wall. Next move?"
    place, moves = after or place, state.moves + 1
    metadata = state.model_dump(exclude_unset=True) | {"moves": moves, "place": list(place)}
    further: dict[str, Any] = {"metadata": metadata, "answer": direction}
    if place == shown.exit:
        return text_outcome(f"The exit is reached in {moves} move{'s'[: moves > 1]}.", 1.0, terminated=True, **further)
    if moves >= state.moves_allowed:
        return text_outcome("No moves left.", terminated=True, **further)
    picture = maze_picture(shown, place, state.size)
    message: ChatMessage = {"role": "user", "content": text, "images": [picture]}
    return StepOutcome(message, 0.0, terminated=False, metadata=metadata, answer=direction)
