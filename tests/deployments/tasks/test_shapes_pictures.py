"""Pictures of the task `shapes`, read pixel by pixel without the code that draws them."""

from collections import deque
from collections.abc import Callable
from io import BytesIO
from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from deployments.tasks.shapes_pictures import (
    COLORS,
    FORMS,
    STEPS,
    Maze,
    Scene,
    _neighbour,
    _Shape,
    maze,
    maze_picture,
    scene,
    scene_picture,
)

seeds = st.integers(0, 2**63 - 1)
sizes = st.integers(48, 200)
scenes = st.tuples(seeds, sizes, st.integers(1, 9), st.integers(0, 7))
WHITE, BLACK = (255, 255, 255), (0, 0, 0)
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
    shown = scene(*arguments)
    seen = [(color, form_of(shape)) for color, shape in components(pixels_of(scene_picture(shown, arguments[1])))]
    assert sorted(seen) == sorted((shape.color, shape.form) for shape in shown.shapes)
    assert shown.count == seen.count((shown.color, shown.form)) <= arguments[2]
    assert len(seen) - shown.count <= arguments[3]


@given(scenes)
def test_shapes_lie_within_the_picture_with_a_pixel_between_two(arguments: tuple[int, int, int, int]) -> None:
    shown = scene(*arguments)
    for shape in shown.shapes:
        assert all(shape.radius <= place < arguments[1] - shape.radius for place in (shape.x, shape.y))
    for one, other in combinations(shown.shapes, 2):
        assert max(abs(one.x - other.x), abs(one.y - other.y)) > one.radius + other.radius + 1


def test_each_count_is_as_likely_and_each_kind_of_shape_is_asked_for() -> None:
    shown = [scene(seed, 64, 6, 6) for seed in range(2100)]
    counts = [each.count for each in shown]
    assert all(250 < counts.count(number) < 350 for number in range(7))
    assert {(each.color, each.form) for each in shown} == set(product(COLORS, FORMS))


@pytest.mark.parametrize("size", [48, 64, 100])
def test_equal_arguments_give_equal_bytes(size: int) -> None:
    makers: tuple[Callable[[int], bytes], ...] = (
        lambda seed: scene_picture(scene(seed, size, 9, 7), size),
        lambda seed: maze_picture((made := maze(seed, 5)), made.start, size),
    )
    for make in makers:
        first = [make(seed) for seed in range(50)]
        assert first == [make(seed) for seed in range(50)]
        assert len(set(first)) > 45
        assert {Image.open(BytesIO(picture)).size for picture in first} == {(size, size)}


def test_a_scene_is_drawn_where_its_shapes_are() -> None:
    shown = Scene((_Shape("red", "square", 5, 6, 3), _Shape("blue", "circle", 30, 40, 4)), "red", "square")
    pixels = pixels_of(scene_picture(shown, 48))
    red = {place for place, color in pixels.items() if color == COLORS["red"]}
    blue = {place for place, color in pixels.items() if color == COLORS["blue"]}
    assert red == set(product(range(2, 9), range(3, 10)))
    assert {(30, 36), (30, 44), (26, 40), (34, 40)} <= blue
    assert not {(26, 36), (34, 44), (26, 44), (34, 36)} & blue
    assert len(red | blue) == sum(color != WHITE for color in pixels.values())


def seen_maze(picture: bytes, size: int, cells: int) -> tuple[dict[Pixel, set[Pixel]], list[Pixel]]:
    """The open neighbours of each cell, by the pixels between middles; and the cells of the dot and of the exit."""
    pixels = pixels_of(picture)
    side = (size - 1) // cells
    middle = {
        cell: (cell[1] * side + side // 2, cell[0] * side + side // 2) for cell in product(range(cells), range(cells))
    }
    ways: dict[Pixel, set[Pixel]] = {cell: set() for cell in middle}
    for one, other in product(middle, repeat=2):
        (x, y), (to_x, to_y) = middle[one], middle[other]
        if abs(one[0] - other[0]) + abs(one[1] - other[1]) == 1:
            between = product(range(min(x, to_x), max(x, to_x) + 1), range(min(y, to_y), max(y, to_y) + 1))
            if not any(pixels[place] == BLACK for place in between):
                ways[one].add(other)
    marks = [[cell for cell in middle if pixels[middle[cell]] == COLORS[color]] for color in ("red", "green")]
    return ways, [cell for found in marks for cell in found]


def distances(ways: dict[Pixel, set[Pixel]], start: Pixel) -> dict[Pixel, int]:
    found = {start: 0}
    waiting = deque([start])
    while waiting:
        cell = waiting.popleft()
        for beside in ways[cell] - found.keys():
            found[beside] = found[cell] + 1
            waiting.append(beside)
    return found


@given(seeds, sizes, st.integers(2, 8))
def test_the_way_through_a_maze_is_the_shortest_one_that_its_picture_shows(seed: int, size: int, cells: int) -> None:
    shown = maze(seed, cells)
    ways, [dot, way_out] = seen_maze(maze_picture(shown, shown.start, size), size, cells)
    assert (dot, way_out) == (shown.start, shown.exit)
    apart = distances(ways, dot)
    assert apart.keys() == set(product(range(cells), range(cells)))
    # A tree: each cell is reached in one way.
    assert sum(map(len, ways.values())) == 2 * (cells**2 - 1)
    way = shown.shortest_way(shown.start)
    assert len(way) == apart[way_out] >= 1
    cell = shown.start
    for direction in way:
        assert _neighbour(cell, direction) in ways[cell]
        cell = _neighbour(cell, direction)
    assert cell == shown.exit


def test_a_cell_has_the_neighbours_that_no_wall_hides() -> None:
    row = Maze(2, frozenset({((0, 0), (0, 1)), ((0, 1), (0, 0))}), (0, 0), (0, 1))
    assert {direction: row.after((0, 0), direction) for direction in STEPS} == {
        "up": None,
        "down": None,
        "left": None,
        "right": (0, 1),
    }
    assert row.shortest_way((0, 1)) == []
    assert row.shortest_way((0, 0)) == ["right"]


@given(seeds, st.integers(48, 100), st.integers(2, 8), st.data())
def test_the_dot_is_drawn_where_it_is(seed: int, size: int, cells: int, data: st.DataObject) -> None:
    shown = maze(seed, cells)
    place = data.draw(st.tuples(st.integers(0, cells - 1), st.integers(0, cells - 1)).filter(lambda c: c != shown.exit))
    _, marks = seen_maze(maze_picture(shown, place, size), size, cells)
    assert marks == [place, shown.exit]
