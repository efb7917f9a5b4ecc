"""What follows for one call from its options and those of its client."""

import httpx
import pytest

from rollout_client.calls.options import CallLimits, CallOptions, ClientDefaults, Deadline


@pytest.mark.parametrize(
    ("client_s", "options", "longest_s", "expected"),
    [
        (None, {}, None, None),
        (None, {}, 60, 60),
        (600, {}, 60, 60),
        (5, {}, 60, 5),
        (600, {}, None, 600),
        (5, {"timeout_s": 90}, 60, 90),
        (5, {"timeout_s": None}, 60, None),
    ],
)
def test_the_timeout_of_a_call_comes_before_that_of_the_client(
    client_s: float | None, options: CallOptions, longest_s: float | None, expected: float | None
) -> None:
    assert ClientDefaults(timeout_s=client_s).limits(options, longest_s).deadline.timeout_s == expected


def test_a_step_of_a_call_ends_no_later_than_the_call() -> None:
    limits = CallLimits(Deadline(100, advice="wait."), retries=3)
    assert limits.at_most(60).deadline.timeout_s == 60
    left_s = limits.at_most(600).deadline.timeout_s
    assert left_s is not None
    assert 90 < left_s <= 100
    assert CallLimits(Deadline(None), retries=3).at_most(60).deadline.timeout_s == 60


@pytest.mark.parametrize("retries", [-1, -10])
def test_negative_retries_are_a_value_error(retries: int) -> None:
    with pytest.raises(ValueError, match=f"^retries={retries}: "):
        ClientDefaults(retries=retries)
    with pytest.raises(ValueError, match=f"^retries={retries}: "):
        ClientDefaults().limits({"retries": retries})


def test_added_headers_replace_those_of_the_same_name_in_any_case() -> None:
    defaults = ClientDefaults(headers=httpx.Headers({"X-A": "1", "x-b": "2"})).replaced({"headers": {"x-a": "3"}})
    assert defaults.headers == httpx.Headers({"x-a": "3", "x-b": "2"})
