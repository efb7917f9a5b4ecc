"""The task `shapes`: what it asks and how it judges; its pictures are read pixel by pixel."""

from collections import deque
from io import BytesIO
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from pydantic import ValidationError

from deployments.tasks.shapes import COLORS, ShapesEnvironment, ShapesInfo, _scene, _scene_picture
from rollout_env import ChatMessage, StepOutcome, check, play
from rollout_env.play import PlayResult

SEED = 5
seeds = st.integers(0, 2**63 - 1)
sizes = st.integers(48, 120)
scenes = st.tuples(seeds, sizes, st.integers(1, 9), st.integers(0, 7))
WHITE = (255, 255, 255)
Pixel = tuple[int, int]


def pixels_of(picture: bytes) -> dict[Pixel, object]:
    """Colors by x and y."""
    image = Image.open(BytesIO(picture))
    assert (image.format, image.mode) == ("PNG", "RGB")
    return {(x, y): image.getpixel((x, y)) for x in range(image.width) for y in range(image.height)}


def components(pixels: dict[Pixel, object]) -> list[tuple[str, set[Pixel]]]:
    """Pixels of one color that touch each other, corners included, with their color's name."""
    names = {color: name for name, color in COLORS.items()}
    unseen = {place: color for place, color in pixels.items() if color != WHITE}
    found: list[tuple[str, set[Pixel]]] = []
    while unseen:
        first, color = unseen.popitem()
        reached, waiting = {first}, deque([first])
        while waiting:
            x, y = waiting.popleft()
            beside = [(x + right, y + down) for right, down in product((-1, 0, 1), repeat=2)]
            for place in [place for place in beside if unseen.get(place) == color]:
                del unseen[place]
                reached.add(place)
                waiting.append(place)
        found.append((names[color], reached))  # type: ignore[index]
    return found


def form_of(shape: set[Pixel]) -> str:
    """A square fills its box, a triangle all of the lowest row of it, a circle neither."""
    rows = {y for _, y in shape}
    lowest = sum(y == max(rows) for _, y in shape)
    width = max(x for x, _ in shape) - min(x for x, _ in shape) + 1
    if len(shape) == width * len(rows):
        return "square"
    return "triangle" if lowest == width else "circle"


@given(scenes)
def test_the_shapes_that_are_seen_in_a_picture_are_those_of_its_scene(arguments: tuple[int, int, int, int]) -> None:
    shown = _scene(*arguments)
    seen = [(color, form_of(shape)) for color, shape in components(pixels_of(_scene_picture(shown, arguments[1])))]
    assert sorted(seen) == sorted((shape.color, shape.form) for shape in shown.shapes)
    assert shown.count == seen.count((shown.color, shown.form)) <= arguments[2]
    assert len(seen) - shown.count <= arguments[3]


def played(replies: list[str], **info: Any) -> PlayResult:
    return play(ShapesEnvironment(), replies, {"extra_env_info": info})


def outcome_of(reply: str, **info: Any) -> StepOutcome:
    [outcome] = played([reply], **info).outcomes
    return outcome


def shown_first(**info: Any) -> ChatMessage:
    [message] = played([], **info).message_log
    return message


def test_a_count_shows_its_picture_with_the_question() -> None:
    shown = _scene(SEED, 64, 6, 6)
    assert (shown.color, shown.form, shown.count) == ("orange", "circle", 2)
    assert shown_first(kind="count", seed=SEED) == {
        "role": "user",
        "content": "How many orange circles are there? Answer with one digit.",
        "images": [_scene_picture(shown, 64)],
    }


def test_the_fields_of_difficulty_are_those_of_the_picture() -> None:
    count = shown_first(kind="count", seed=3, size=128, most_counted=9, most_others=0)
    assert count.get("images") == [_scene_picture(_scene(3, 128, 9, 0), 128)]


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


@pytest.mark.parametrize(
    ("info", "complaint"),
    [
        ({"kind": "count"}, r"seed\n  Field required"),
        ({"kind": "count", "seed": True}, r"seed\n  Input should be a valid integer"),
        ({"kind": "count", "seed": 1, "size": 47}, r"size\n  Input should be greater than or equal to 48"),
        ({"kind": "count", "seed": 1, "digit": 1}, r"digit\n  Extra inputs are not permitted"),
    ],
)
def test_a_state_that_is_no_question_is_refused_by_the_name_of_its_field(info: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValidationError, match=complaint):
        ShapesInfo(**info)


def test_it_keeps_the_rules_of_environments() -> None:
    check(ShapesEnvironment, replies=["3", "up", "\\boxed{1}"], samples=6)
