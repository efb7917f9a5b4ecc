"""How generated requests are changed, so that they get further into the service."""

from typing import Any

import pytest

from tests.endurance.fuzz.adjusted_requests import with_known_tokens, with_short_waits


@pytest.mark.parametrize("name", ["wait_s", "checksums_within_s"])
@pytest.mark.parametrize(
    ("given", "sent"),
    [(600, 0.05), ("600.0", 0.05), (0.04, 0.04), (-1, -1), (True, True), ("soon", "soon"), (None, None), ([9], [9])],
)
def test_waits_are_cut_short_and_other_values_stay(name: str, given: Any, sent: Any) -> None:
    assert with_short_waits({name: given, "min_version": 7}) == {name: sent, "min_version": 7}


def test_every_other_body_of_a_score_has_ids_that_the_model_has_under_the_current_weights() -> None:
    assert with_known_tokens({"sequences": [[1, 262, 999]], "start": 4, "policy": {"version": 3}, "top_k": 2}) == {
        "sequences": [[1, 0, 213]],
        "start": 1,
        "top_k": 2,
    }
    both = {"sequences": [[1, 262], [3, 4]], "policy": {"version": 3}}
    assert with_known_tokens(both) == both


@pytest.mark.parametrize(
    "policy", [None, 3, {"version": "x"}, {"version": True}, {"wait_s": "soon"}, {"min_version": -1}, {"x": 1}]
)
def test_a_demand_of_weights_that_is_malformed_stays(policy: Any) -> None:
    assert with_known_tokens({"sequences": [[1]], "policy": policy}) == {"sequences": [[1]], "policy": policy}


@pytest.mark.parametrize(
    "body", [None, [], {}, {"sequences": 1}, {"sequences": [3]}, {"sequences": [["a", None, True, -1]], "start": "x"}]
)
def test_what_is_not_of_the_contract_stays(body: Any) -> None:
    assert with_known_tokens(body) == body


def test_a_start_stays_where_there_is_no_token() -> None:
    assert with_known_tokens({"sequences": [[]], "start": 5}) == {"sequences": [[]], "start": 5}
