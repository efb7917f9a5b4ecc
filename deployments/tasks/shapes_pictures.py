"""Pictures of the task `shapes`: scenes to count in, bar charts and mazes, each made from a seed, and their drawing.

Equal arguments give equal pictures, pixel by pixel: colors are flat and edges are not smoothed. Pure functions.
"""

import random
from collections import deque
from dataclasses import dataclass
from io import BytesIO
from typing import Literal, NamedTuple, get_args

from PIL import Image, ImageDraw, ImageFont

Color = Literal["red", "green", "blue", "orange"]
Form = Literal["circle", "square", "triangle"]
Direction = Literal["up", "down", "left", "right"]
Cell = tuple[int, int]
"""Row and column, from the top left."""
RGB = tuple[int, int, int]

COLORS: dict[Color, RGB] = {
    "red": (220, 30, 30),
    "green": (20, 150, 50),
    "blue": (30, 70, 220),
    "orange": (250, 160, 0),
}
FORMS: tuple[Form, ...] = get_args(Form)
STEPS: dict[Direction, Cell] = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
WHITE, BLACK, GRAY = (255, 255, 255), (0, 0, 0), (215, 215, 215)
SCENE_ROWS = 4
"""Each shape of a scene lies within its own cell of so many rows and columns."""
SMALLEST_RADIUS = 3
LARGEST_VALUE = 9
"""The largest value of a bar. Each line of the grid behind the bars is 1."""
LABEL_HEIGHT = 11
"""Pixels of the letters below the bars, which are 6 wide."""


class Shape(NamedTuple):
    """A shape around a pixel. It reaches `radius` pixels to each side."""

    color: Color
    form: Form
    x: int
    y: int
    radius: int


@dataclass(frozen=True, slots=True)
class Scene:
    """Shapes that do not touch, and the kind of shape that is asked for."""

    shapes: tuple[Shape, ...]
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
        radius = draw.randint(max(SMALLEST_RADIUS, largest - largest // 3), largest)
        free = cell - 2 - 2 * radius
        row, column = divmod(place, SCENE_ROWS)
        x, y = (start * cell + radius + draw.randint(0, free) for start in (column, row))
        shapes.append(Shape(color, form, x, y, radius))
    return Scene(tuple(shapes), *asked)


def scene_picture(shown: Scene, size: int) -> bytes:
    """The scene as a PNG file of `size` x `size` pixels, on white."""
    image, draw = blank(size)
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
class Chart:
    """Heights of the bars A, B, C and so on, and the place of the bar that is asked for."""

    values: tuple[int, ...]
    asked: int

    @property
    def name(self) -> str:
        return bar_name(self.asked)


def bar_name(place: int) -> str:
    return chr(ord("A") + place)


def chart(seed: int, bars: int) -> Chart:
    draw = random.Random(seed)
    return Chart(tuple(draw.randint(0, LARGEST_VALUE) for _ in range(bars)), draw.randrange(bars))


def chart_picture(shown: Chart, size: int) -> bytes:
    """The chart as a PNG file: bars in front of a grid with a line for each number, and a letter below each bar."""
    image, draw = blank(size)
    bottom = size - LABEL_HEIGHT - 2
    unit = (bottom - 1) // LARGEST_VALUE
    for value in range(LARGEST_VALUE + 1):
        draw.line([(0, bottom - value * unit), (size - 1, bottom - value * unit)], BLACK if value == 0 else GRAY)
    slot = size // len(shown.values)
    font = ImageFont.load_default_imagefont()
    colors = tuple(COLORS.values())
    for place, value in enumerate(shown.values):
        left = place * slot + slot // 5
        if value:
            right = (place + 1) * slot - slot // 5 - 1
            draw.rectangle((left, bottom - value * unit, right, bottom), colors[place % len(colors)])
        draw.text((place * slot + slot // 2 - 3, bottom + 1), bar_name(place), BLACK, font)
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
        beside = neighbour(cell, direction)
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


def neighbour(cell: Cell, direction: Direction) -> Cell:
    return cell[0] + STEPS[direction][0], cell[1] + STEPS[direction][1]


def maze(seed: int, cells: int) -> Maze:
    """Digs from a first cell to neighbours that were not reached before, back where there are none."""
    draw = random.Random(seed)
    every = [(row, column) for row in range(cells) for column in range(cells)]
    start, way_out = draw.sample(every, 2)
    unreached, path = set(every) - {start}, [start]
    passages = set()
    while unreached:
        beside = [cell for direction in STEPS if (cell := neighbour(path[-1], direction)) in unreached]
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
    image, draw = blank(size)
    side = (size - 1) // shown.cells
    margin = max(2, side // 4)
    for cell, color in ((shown.exit, COLORS["green"]), (place, COLORS["red"])):
        top, left = (start * side + margin for start in cell)
        box = (left, top, left + side - 2 * margin, top + side - 2 * margin)
        (draw.ellipse if color == COLORS["red"] else draw.rectangle)(box, color)
    last = shown.cells * side
    draw.rectangle((0, 0, last, last), outline=BLACK)
    for row in range(shown.cells):
        for column in range(shown.cells):
            right, below = (column + 1) * side, (row + 1) * side
            if shown.after((row, column), "right") is None:
                draw.line([(right, row * side), (right, below)], BLACK)
            if shown.after((row, column), "down") is None:
                draw.line([(column * side, below), (right, below)], BLACK)
    return png(image)


def blank(size: int) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    image = Image.new("RGB", (size, size), WHITE)
    return image, ImageDraw.Draw(image)


def png(image: Image.Image) -> bytes:
    file = BytesIO()
    image.save(file, "PNG")
    return file.getvalue()
