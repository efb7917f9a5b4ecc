"""The task `shapes`: what it shows and asks, how it judges, and what it says of bad states."""

import re
from io import BytesIO
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from pydantic import ValidationError

from deployments.tasks.shapes import KINDS, MAZE_PROMPT, ShapesEnvironment, ShapesInfo
from deployments.tasks.shapes_pictures import (
    STEPS,
    Direction,
    maze,
    maze_picture,
    scene,
    scene_picture,
)
from rollout_env import ChatMessage, SampleRejected, StepOutcome, check, play
from rollout_env.play import PlayResult

SEED = 5
MAZE = maze(SEED, 4)
WAY = MAZE.shortest_way(MAZE.start)
seeds = st.integers(0, 2**63 - 1)


def played(replies: list[str], **info: Any) -> PlayResult:
    return play(ShapesEnvironment(), replies, {"extra_env_info": info})


def outcome_of(reply: str, **info: Any) -> StepOutcome:
    [outcome] = played([reply], **info).outcomes
    return outcome


def shown_first(**info: Any) -> ChatMessage:
    [message] = played([], **info).message_log
    return message


def test_a_count_shows_its_picture_with_the_question() -> None:
    shown = scene(SEED, 64, 6, 6)
    assert (shown.color, shown.form, shown.count) == ("orange", "circle", 2)
    assert shown_first(kind="count", seed=SEED) == {
        "role": "user",
        "content": "How many orange circles are there? Answer with one digit.",
        "images": [scene_picture(shown, 64)],
    }


def test_a_maze_is_shown_with_the_dot_at_the_start() -> None:
    assert shown_first(kind="maze", seed=SEED) == {
        "role": "user",
        "content": MAZE_PROMPT,
        "images": [maze_picture(MAZE, MAZE.start, 64)],
    }


def test_the_fields_of_difficulty_are_those_of_the_picture() -> None:
    count = shown_first(kind="count", seed=3, size=128, most_counted=9, most_others=0)
    assert count.get("images") == [scene_picture(scene(3, 128, 9, 0), 128)]
    way = shown_first(kind="maze", seed=3, size=90, cells=8)
    assert way.get("images") == [maze_picture(maze(3, 8), maze(3, 8).start, 90)]


@pytest.mark.parametrize(
    ("reply", "reward", "observation", "answer"),
    [
        ("2", 1.0, "Environment: correct", "2"),
        (" 2\n", 1.0, "Environment: correct", "2"),
        ("There are \\boxed{2}.", 1.0, "Environment: correct", "2"),
        ("<think>4? no</think>2", 1.0, "Environment: correct", "2"),
        ("4", 0.0, "Environment: incorrect. Expected 2.", "4"),
        ("\\boxed{2}, no, \\boxed{0}", 0.0, "Environment: incorrect. Expected 2.", "0"),
        *(
            (malformed, 0.0, "Environment: the reply is not one digit. Expected 2.", None)
            for malformed in ("", "22", "02", "2.", "-2", "2.0", "two", "2 circles", "٢", "②", "<think>2", "\\boxed{}")
        ),
    ],
)
def test_a_reply_is_right_if_it_is_the_digit(reply: str, reward: float, observation: str, answer: str | None) -> None:
    assert outcome_of(reply, kind="count", seed=SEED) == StepOutcome(
        observation={"role": "user", "content": observation}, reward=reward, terminated=True, answer=answer
    )


@given(seeds)
def test_exactly_one_digit_is_right(seed: int) -> None:
    rewards = {digit: outcome_of(str(digit), kind="count", seed=seed).reward for digit in range(10)}
    assert rewards == {digit: float(digit == scene(seed, 64, 6, 6).count) for digit in range(10)}


def test_a_move_shows_the_maze_after_it() -> None:
    [first, *_] = WAY
    place = MAZE.after(MAZE.start, first)
    assert place is not None
    assert outcome_of(f" {first.upper()}\n", kind="maze", seed=SEED) == StepOutcome(
        observation={"role": "user", "content": "Next move?", "images": [maze_picture(MAZE, place, 64)]},
        reward=0.0,
        terminated=False,
        metadata={"kind": "maze", "seed": SEED, "moves": 1, "place": list(place)},
        answer=first,
    )


def blocked() -> Direction:
    return next(direction for direction in STEPS if MAZE.after(MAZE.start, direction) is None)


@pytest.mark.parametrize(
    ("reply", "text", "answer"),
    [
        (blocked(), "There is a wall. Next move?", blocked()),
        ("north", "'north' is not a move. Next move?", None),
        ("", "'' is not a move. Next move?", None),
        ("up down", "'up down' is not a move. Next move?", None),
        ("\x1b[2J" + "y" * 100, "'\\x1b[2j" + "y" * 16 + "' is not a move. Next move?", None),
    ],
)
def test_what_moves_nothing_is_counted_and_shows_the_same_maze(reply: str, text: str, answer: str | None) -> None:
    assert outcome_of(reply, kind="maze", seed=SEED, size=80) == StepOutcome(
        observation={"role": "user", "content": text, "images": [maze_picture(MAZE, MAZE.start, 80)]},
        reward=0.0,
        terminated=False,
        metadata={"kind": "maze", "seed": SEED, "size": 80, "moves": 1, "place": list(MAZE.start)},
        answer=answer,
    )


@given(seeds, st.integers(2, 8))
def test_the_shortest_way_leads_out_of_every_maze_with_the_fewest_moves_allowed(seed: int, cells: int) -> None:
    made = maze(seed, cells)
    way = made.shortest_way(made.start)
    for limit in ({}, {"max_moves": len(way)}):
        result = played([*way, "up"], kind="maze", seed=seed, cells=cells, **limit)
        assert (result.total_reward, result.terminated, result.unused_replies) == (1.0, True, ["up"])
        assert result.extra_env_info["place"] == list(made.exit)
        assert [outcome.reward for outcome in result.outcomes] == [0.0] * (len(way) - 1) + [1.0]
    ending = result.message_log[-1]
    assert ending == {
        "role": "user",
        "content": f"The exit is reached in {len(way)} move{'' if len(way) == 1 else 's'}.",
    }


@pytest.mark.parametrize(("limit", "replies"), [({}, 2 * len(WAY)), ({"max_moves": len(WAY) + 1}, len(WAY) + 1)])
def test_a_maze_is_lost_after_its_moves(limit: dict[str, int], replies: int) -> None:
    result = played([blocked()] * 100, kind="maze", seed=SEED, **limit)
    assert (len(result.turns), result.total_reward, result.terminated) == (replies, 0.0, True)
    assert result.message_log[-1] == {"role": "user", "content": "No moves left."}
    assert all("images" in outcome.observations[0] for outcome in result.outcomes[:-1])


@pytest.mark.parametrize(
    ("info", "complaint"),
    [
        ({"kind": "count"}, r"seed\n  Field required"),
        ({"kind": "sum", "seed": 1}, r"kind\n  Input should be 'count' or 'maze'"),
        ({"kind": "count", "seed": "1"}, r"seed\n  Input should be a valid integer"),
        ({"kind": "count", "seed": True}, r"seed\n  Input should be a valid integer"),
        ({"kind": "count", "seed": -1}, r"seed\n  Input should be greater than or equal to 0"),
        ({"kind": "count", "seed": 1, "size": 47}, r"size\n  Input should be greater than or equal to 48"),
        ({"kind": "count", "seed": 1, "size": 1025}, r"size\n  Input should be less than or equal to 1024"),
        ({"kind": "count", "seed": 1, "most_counted": 10}, r"most_counted\n  Input should be less than or equal to 9"),
        ({"kind": "maze", "seed": 1, "cells": 9}, r"cells\n  Input should be less than or equal to 8"),
        ({"kind": "count", "seed": 1, "digit": 1}, r"digit\n  Extra inputs are not permitted"),
        ({"kind": "maze", "seed": 1, "place": [0]}, r"place\n  List should have at least 2 items"),
    ],
)
def test_a_state_that_is_no_question_is_refused_by_the_name_of_its_field(info: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValidationError, match=complaint):
        ShapesInfo(**info)


def test_a_maze_that_is_over_is_refused() -> None:
    way_out = list(MAZE.exit)
    over = {"kind": "maze", "seed": SEED, "place": way_out}
    with pytest.raises(SampleRejected, match=re.escape(f"the maze is over: place is {way_out}")):
        played([], **over)
    used_up = {"kind": "maze", "seed": SEED, "max_moves": 9, "moves": 9}
    with pytest.raises(SampleRejected, match=r"the maze is over: place is .* after 9 moves"):
        play(
            ShapesEnvironment(), ["up"], {"message_log": [{"role": "user", "content": "?"}], "extra_env_info": used_up}
        )


def test_example_samples_are_of_the_kinds_in_turn() -> None:
    samples = ShapesEnvironment().example_samples(4, 0)
    assert [sample["extra_env_info"]["kind"] for sample in samples] == ["count", "maze", "count", "maze"]
    assert all(sample["extra_env_info"].keys() == {"kind", "seed"} for sample in samples)
    counts = ShapesEnvironment(kinds=["count"]).example_samples(3, 0)
    assert [sample["extra_env_info"]["kind"] for sample in counts] == ["count"] * 3
    with pytest.raises(ValueError, match="kinds must name at least one of count, maze"):
        ShapesEnvironment(kinds=[])


@pytest.mark.parametrize("kind", KINDS)
def test_a_picture_is_small_and_of_the_size_that_is_asked_for(kind: str) -> None:
    [picture] = shown_first(kind=kind, seed=1)["images"]
    assert isinstance(picture, bytes)
    assert len(picture) < 1000
    assert Image.open(BytesIO(picture)).size == (64, 64)


def test_it_keeps_the_rules_of_environments() -> None:
    check(ShapesEnvironment, replies=["up", "left", "3", "down", "right"], samples=6)
