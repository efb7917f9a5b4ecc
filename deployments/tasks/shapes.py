"""The task `shapes`: how many shapes of one color and form a picture shows, for models that see.

The pictures are drawn here, each from a seed. Equal arguments give equal pictures, pixel by pixel: colors are flat and
edges are not smoothed.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from typing import Any, ClassVar, Literal, NamedTuple, get_args

from PIL import Image, ImageDraw
from pydantic import BaseModel, ConfigDict, Field

from deployments.tasks.replies import boxed_or_whole, text_outcome
from rollout_env import ChatMessage, Reference, StartOutcome, StepOutcome, TaskEnvironment, reply_text

Color = Literal["red", "green", "blue", "orange"]
Form = Literal["circle", "square", "triangle"]

COLORS: dict[Color, tuple[int, int, int]] = {
    "red": (220, 30, 30),
    "green": (20, 150, 50),
    "blue": (30, 70, 220),
    "orange": (250, 160, 0),
}
FORMS: tuple[Form, ...] = get_args(Form)
SEEDS = 2**31
SCENE_ROWS = 4
"""Each shape of a scene lies within its own cell of so many rows and columns."""
_WHITE = (255, 255, 255)
_SMALLEST_RADIUS = 3


class _Shape(NamedTuple):
    """A shape around a pixel. It reaches `radius` pixels to each side."""

    color: Color
    form: Form
    x: int
    y: int
    radius: int


@dataclass(frozen=True, slots=True)
class _Scene:
    """Shapes that do not touch, and the kind of shape that is asked for."""

    shapes: tuple[_Shape, ...]
    color: Color
    form: Form

    @property
    def count(self) -> int:
        return sum((shape.color, shape.form) == (self.color, self.form) for shape in self.shapes)


def _scene(seed: int, size: int, most_counted: int, most_others: int) -> _Scene:
    """0 to `most_counted` shapes of one color and form, all numbers alike often, and 0 to `most_others` others."""
    draw = random.Random(seed)
    kinds = [(color, form) for color in COLORS for form in FORMS]
    asked = draw.choice(kinds)
    kinds.remove(asked)
    counted, others = draw.randint(0, most_counted), draw.randint(0, most_others)
    drawn = [asked] * counted + draw.choices(kinds, k=others)
    cell = size // SCENE_ROWS
    # One pixel of each cell stays free, so that neighbours do not touch.
    largest = (cell - 2) // 2
    shapes = []
    for place, (color, form) in zip(draw.sample(range(SCENE_ROWS**2), len(drawn)), drawn, strict=True):
        radius = draw.randint(max(_SMALLEST_RADIUS, largest - largest // 3), largest)
        free = cell - 2 - 2 * radius
        row, column = divmod(place, SCENE_ROWS)
        x, y = (start * cell + radius + draw.randint(0, free) for start in (column, row))
        shapes.append(_Shape(color, form, x, y, radius))
    return _Scene(tuple(shapes), *asked)


def _scene_picture(shown: _Scene, size: int) -> bytes:
    """The scene as a PNG file of `size` x `size` pixels, on white."""
    image = Image.new("RGB", (size, size), _WHITE)
    draw = ImageDraw.Draw(image)
    for shape in shown.shapes:
        x, y, radius = shape.x, shape.y, shape.radius
        box = (x - radius, y - radius, x + radius, y + radius)
        if shape.form == "circle":
            draw.ellipse(box, COLORS[shape.color])
        elif shape.form == "square":
            draw.rectangle(box, COLORS[shape.color])
        else:
            draw.polygon([(x, y - radius), (x + radius, y + radius), (x - radius, y + radius)], COLORS[shape.color])
    return png(image)


def png(image: Image.Image) -> bytes:
    file = BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


class ShapesInfo(BaseModel):
    """A question about a picture."""

    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)

    kind: Literal["count"] = "count"
    """The question: how many shapes there are."""
    seed: int = Field(ge=0, lt=2**63)
    """Seed of the picture, and of the question."""
    size: int = Field(default=64, ge=48, le=1024)
    """Pixels of each side of the picture."""
    most_counted: int = Field(default=6, ge=1, le=9)
    """The largest answer. Each from 0 on is as likely."""
    most_others: int = Field(default=6, ge=0, le=7)
    """How many shapes of other colors and forms there are at most."""

    @property
    def scene(self) -> _Scene:
        return _scene(self.seed, self.size, self.most_counted, self.most_others)


class ShapesEnvironment(TaskEnvironment):
    """One turn: counts shapes in a picture that it draws. The right digit has reward 1, anything else 0.

    A start shows the picture with the question, so samples need no `messages`.
    """

    description: ClassVar[str] = "Count the shapes of one color and form in a picture."
    ExtraEnvInfo: ClassVar[type[BaseModel]] = ShapesInfo

    def start(self, message_log: list[ChatMessage], extra_env_info: ShapesInfo) -> StartOutcome:  # noqa: ARG002
        """Shows the picture and asks."""
        shown = extra_env_info.scene
        question = f"How many {shown.color} {shown.form}s are there? Answer with one digit."
        picture = _scene_picture(shown, extra_env_info.size)
        return StartOutcome(observation={"role": "user", "content": question, "images": [picture]})

    def step(self, message_log: list[ChatMessage], extra_env_info: ShapesInfo) -> StepOutcome:
        """Judges the digit that is in the reply's last box, or that the reply consists of."""
        answer, expected = boxed_or_whole(reply_text(message_log[-1])), extra_env_info.scene.count
        if answer not in tuple("0123456789"):
            text = f"Environment: the reply is not one digit. Expected {expected}."
            return text_outcome(text, terminated=True)
        right = int(answer) == expected
        text = "Environment: correct" if right else f"Environment: incorrect. Expected {expected}."
        return text_outcome(text, float(right), terminated=True, answer=answer)

    def reference(self, sample: Mapping[str, Any]) -> Reference:
        """The digit."""
        return Reference([str(ShapesInfo(**sample["extra_env_info"]).scene.count)])

    def example_samples(self, count: int, seed: int) -> list[dict[str, Any]]:
        """Samples of the default difficulty, each with a seed of its own."""
        return [{"extra_env_info": {"seed": drawn}} for drawn in random.Random(seed).sample(range(SEEDS), count)]
