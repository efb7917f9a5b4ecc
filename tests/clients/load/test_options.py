"""Options and shapes of a load test, and the messages for wrong options."""

from argparse import ArgumentTypeError

import pytest

from rollout_load.options import CLASSES, DEFAULT_CLASSES, SHAPES, checked, names, p95_limits, shares, users_at


def test_classes_have_the_shares_that_are_given_and_one_otherwise() -> None:
    assert shares("interactive=3, groups") == {"interactive": 3, "groups": 1}
    assert set(shares(DEFAULT_CLASSES)) == set(CLASSES) - {"agent", "pusher"}


@pytest.mark.parametrize(
    ("text", "finding"),
    [
        ("trainers=2", "there is no class 'trainers'; the classes are interactive, groups"),
        ("groups=0", "the share of groups is '0'; give a number from 1"),
        ("groups=many", "the share of groups is 'many'; give a number from 1"),
        (" ,", "no class is named"),
    ],
)
def test_shares_that_cannot_be_are_refused_in_words(text: str, finding: str) -> None:
    with pytest.raises(ArgumentTypeError, match=finding):
        checked(shares)(text)


def test_a_bound_of_p95_is_one_of_all_classes_or_of_one() -> None:
    assert p95_limits("10") == {"": 10.0}
    assert p95_limits("interactive=2,first=0.5,30") == {"interactive": 2.0, "first": 0.5, "": 30.0}
    assert p95_limits("") == {}
    with pytest.raises(ValueError, match="there is no class 'slow'"):
        p95_limits("slow=1")


def test_a_checked_option_stays_text() -> None:
    assert checked(p95_limits)("first=0.5") == "first=0.5"
    assert names(" math, , code") == ("math", "code")


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
