"""Which fields of samples an environment refuses."""

from typing import Any

import pytest
from pydantic import BaseModel

from deployments.environments.host import _MOST_REFUSED_FIELDS, _refused_fields
from deployments.protocols.environments import RefusedField
from deployments.tasks.sliding_puzzle import SlidingPuzzleState


class Inner(BaseModel):
    rows: list[list[int]]


class Outer(BaseModel):
    count: int
    inner: Inner | None = None
    either: str | int = 0


NO_INTEGER = "Input should be a valid integer"


@pytest.mark.parametrize(
    ("extra_env_info", "expected"),
    [
        ({"count": 1}, []),
        ({"count": "1", "more": [1]}, []),
        ({}, [(("count",), "Field required")]),
        ({"count": 1, "inner": {}}, [(("inner", "rows"), "Field required")]),
        ({"count": 1, "inner": {"rows": [[1], [2, None]]}}, [(("inner", "rows", 1, 1), NO_INTEGER)]),
        (
            {"count": 1, "either": []},
            [(("either", "str"), "Input should be a valid string"), (("either", "int"), NO_INTEGER)],
        ),
    ],
)
def test_each_wrong_field_is_named_by_its_path(extra_env_info: dict[str, Any], expected: list[Any]) -> None:
    refused = _refused_fields(Outer, [{"count": 0}, extra_env_info])
    assert refused == [RefusedField(1, location, message) for location, message in expected]


def test_what_a_validator_refuses_is_named_without_its_kind() -> None:
    [refused] = _refused_fields(SlidingPuzzleState, [{"board": [[1, 2], [0, 2]]}])
    assert refused == RefusedField(
        0, ("board",), "board must be a square that holds each of 0..3 once, got [[1, 2], [0, 2]]"
    )


def test_only_the_first_wrong_fields_are_named() -> None:
    assert [field.place for field in _refused_fields(Outer, [{}] * 100)] == list(range(_MOST_REFUSED_FIELDS))
