"""What the options of a load test mean, and what is wrong with those that mean nothing."""

from argparse import ArgumentTypeError

import pytest

from rollout_load.options import CLASSES, DEFAULT_CLASSES, checked, names, p95_limits, shares


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
