"""How many users a shape has at a time."""

import pytest

from rollout_load.options import SHAPES, users_at


@pytest.mark.parametrize(
    ("shape", "elapsed", "users"),
    [
        ("constant", 0.0, 20),
        ("ramp", 0.0, 1),
        ("ramp", 0.4, 10),
        ("ramp", 0.8, 20),
        ("ramp", 0.99, 20),
        ("spike", 0.0, 4),
        ("spike", 0.39, 4),
        ("spike", 0.4, 20),
        ("spike", 0.59, 20),
        ("spike", 0.6, 4),
        ("soak", 0.0, 1),
        ("soak", 0.025, 10),
        ("soak", 0.05, 20),
        ("soak", 0.99, 20),
    ],
)
def test_a_shape_of_twenty_users(shape: str, elapsed: float, users: int) -> None:
    assert users_at(shape, elapsed, 20) == users


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("elapsed", [0.0, 0.5, 0.999])
def test_one_user_is_there_all_the_time(shape: str, elapsed: float) -> None:
    assert users_at(shape, elapsed, 1) == 1
