"""Pictures of the task `shapes`: scenes to count in and mazes, each made from a seed, and their drawing.

Equal arguments give equal pictures, pixel by pixel: colors are flat and edges are not smoothed. Pure functions.
"""

import random
from collections import deque
from dataclasses import dataclass
from io import BytesIO
from typing import Literal, NamedTuple, get_args

from PIL import Image, ImageDraw

Color = Literal["red", "green", "blue", "orange"]
Form = Literal["circle", "square", "triangle"]
Direction = Literal["up", "down", "left", "right"]
Cell = tuple[int, int]
"""Row and column, from the top left."""

COLORS: dict[Color, tuple[int, int, int]] = {
    "red": (220, 30, 30),
    "green": (20, 150, 50),
    "blue": (30, 70, 220),
    "orange": (250, 160, 0),
}
FORMS: tuple[Form, ...] = get_args(Form)
STEPS: dict[Direction, Cell] = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
_WHITE, _BLACK = (255, 255, 255), (0, 0, 0)
SCENE_ROWS = 4
"""Each shape of a scene lies within its own cell of so many rows and columns."""
_SMALLEST_RADIUS = 3


class _Shape(NamedTuple):
    """A shape around a pixel. It reaches `radius` pixels to each side."""

    color: Color
    form: Form
    x: int
    y: int
    radius: int


@dataclass(frozen=True, slots=True)
class Scene:
    """Shapes that do not touch, and the kind of shape that is asked for."""

    shapes: tuple[_Shape, ...]
    color: Color
    form: Form

    @property
    def count(self) -> int:
        return sum((shape.color, shape.form) == (self.color, self.form) for shape in self.shapes)


def scene(seed: int, size: int, most_counted: int, most_others: int) -> Scene:
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
    return Scene(tuple(shapes), *asked)


def scene_picture(shown: Scene, size: int) -> bytes:
    """The scene as a PNG file of `size` x `size` pixels, on white."""
    image, draw = _blank(size)
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


@dataclass(frozen=True, slots=True)
class Maze:
    """A square of cells, of which each leads to each other one in one way."""

    cells: int
    """Cells in a row."""
    passages: frozenset[tuple[Cell, Cell]]
    """Neighbours without a wall between them, both ways round."""
    start: Cell
    exit: Cell

    def after(self, cell: Cell, direction: Direction) -> Cell | None:
        """The next cell in this direction; `None` where a wall is."""
        beside = _neighbour(cell, direction)
        return beside if (cell, beside) in self.passages else None

    def shortest_way(self, cell: Cell) -> list[Direction]:
        """The moves from the cell to the exit, none if it is the exit."""
        ways: dict[Cell, list[Direction]] = {cell: []}
        waiting = deque([cell])
        while self.exit not in ways:
            reached = waiting.popleft()
            for direction in STEPS:
                beside = self.after(reached, direction)
                if beside is not None and beside not in ways:
                    ways[beside] = [*ways[reached], direction]
                    waiting.append(beside)
        return ways[self.exit]


def _neighbour(cell: Cell, direction: Direction) -> Cell:
    return cell[0] + STEPS[direction][0], cell[1] + STEPS[direction][1]


def maze(seed: int, cells: int) -> Maze:
    """Digs from a first cell to neighbours that were not reached before, back where there are none."""
    draw = random.Random(seed)
    every = [(row, column) for row in range(cells) for column in range(cells)]
    start, way_out = draw.sample(every, 2)
    unreached, path = set(every) - {start}, [start]
    passages = set()
    while unreached:
        beside = [cell for direction in STEPS if (cell := _neighbour(path[-1], direction)) in unreached]
        if not beside:
            path.pop()
            continue
        dug = draw.choice(beside)
        passages |= {(path[-1], dug), (dug, path[-1])}
        unreached.remove(dug)
        path.append(dug)
    return Maze(cells, frozenset(passages), start, way_out)


def maze_picture(shown: Maze, place: Cell, size: int) -> bytes:
    """The maze as a PNG file: black walls, a green square at the exit, a red dot at `place`."""
    image, draw = _blank(size)
    side = (size - 1) // shown.cells
    margin = max(2, side // 4)
    for cell, color in ((shown.exit, COLORS["green"]), (place, COLORS["red"])):
        top, left = (start * side + margin for start in cell)
        box = (left, top, left + side - 2 * margin, top + side - 2 * margin)
        (draw.ellipse if color == COLORS["red"] else draw.rectangle)(box, color)
    last = shown.cells * side
    draw.rectangle((0, 0, last, last), outline=_BLACK)
    for row in range(shown.cells):
        for column in range(shown.cells):
            right, below = (column + 1) * side, (row + 1) * side
            if shown.after((row, column), "right") is None:
                draw.line([(right, row * side), (right, below)], _BLACK)
            if shown.after((row, column), "down") is None:
                draw.line([(column * side, below), (right, below)], _BLACK)
    return png(image)


def _blank(size: int) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    image = Image.new("RGB", (size, size), _WHITE)
    return image, ImageDraw.Draw(image)


def png(image: Image.Image) -> bytes:
    file = BytesIO()
    image.save(file, "PNG")
    return file.getvalue()
