"""Wrong items beyond the first one cost no time."""

from typing import Annotated, Any

import pytest
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from deployments.upstream.vllm.request_validation import fail_at_first_wrong_item


class Call(BaseModel):
    name: str


class Leaf(BaseModel):
    type: str
    children: "list[Leaf]" = []


class Conversation(BaseModel):
    type: str = "conversation"
    items: list[Call | int] = []
    names: set[int] | None = None
    pairs: Annotated[list[list[int]], Field(max_length=3)] = []
    trees: list[Leaf] = []


fail_at_first_wrong_item(Conversation)
ADAPTERS: list[TypeAdapter[Conversation]] = [TypeAdapter(Conversation), TypeAdapter(Annotated[Conversation, Field()])]


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize(
    ("field", "items", "places"),
    [
        ("items", [1, "x", "y", "z"], [("items", 1, "Call"), ("items", 1, "int")]),
        ("pairs", [[1], [2, "x", "y"], ["z"]], [("pairs", 1, 1)]),
        ("pairs", [[1]] * 4, [("pairs",)]),
        ("trees", [{"type": "a"}, {"type": 1}, {"type": 2}], [("trees", 1, "type")]),
    ],
)
def test_the_errors_are_those_of_the_first_wrong_item(
    adapter: TypeAdapter[Conversation], field: str, items: list[Any], places: list[tuple[str | int, ...]]
) -> None:
    with pytest.raises(ValidationError) as refused:
        adapter.validate_python({field: items})
    assert [error["loc"] for error in refused.value.errors()] == places


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_a_wrong_item_of_a_set_ends_it_too(adapter: TypeAdapter[Conversation]) -> None:
    with pytest.raises(ValidationError) as refused:
        adapter.validate_python({"names": ["x", "y", "z"]})
    assert refused.value.error_count() == 1


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_what_is_right_is_read_as_before(adapter: TypeAdapter[Conversation]) -> None:
    right = {"items": [{"name": "a"}, 3], "names": {1}, "pairs": [[1], []], "trees": [{"type": "a", "children": []}]}
    assert adapter.validate_python(right).model_dump() == {"type": "conversation", **right}
    assert Conversation(items=[1]).items == [1]


def test_the_other_wrong_items_must_still_be_left_out() -> None:
    # Otherwise pydantic ends at the first one by itself: drop the patch.
    with pytest.raises(ValidationError) as refused:
        TypeAdapter(list[Call]).validate_python([{}, {}])
    assert refused.value.error_count() == 2
