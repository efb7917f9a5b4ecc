"""Requests with many wrong items, which cost no time beyond the first one, and messages with null fields."""

from typing import Annotated, Any

import pytest
from pydantic import BaseModel, Field, TypeAdapter, ValidationError
from vllm.entrypoints.anthropic.protocol import AnthropicCountTokensRequest, AnthropicMessagesRequest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.serve.tokenize.protocol import DetokenizeRequest, TokenizeChatRequest
from vllm.renderers.chat_utils import ChatCompletionMessageParam

from deployments.generation.serving.layers import REQUESTS
from deployments.upstream.vllm.request_validation import fail_at_first_wrong_item, take_null_fields_of_messages

# Importing vLLM takes seconds.
pytestmark = pytest.mark.slow


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
        ("names", ["x", "y", "z"], [("names", 0)]),
    ],
)
def test_the_errors_are_those_of_the_first_wrong_item(
    adapter: TypeAdapter[Conversation], field: str, items: list[Any], places: list[tuple[str | int, ...]]
) -> None:
    with pytest.raises(ValidationError) as refused:
        adapter.validate_python({field: items})
    assert [error["loc"] for error in refused.value.errors()] == places


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


QUESTION = {"role": "user", "content": "2 + 3?"}


def test_null_fields_are_left_out_once_however_often_it_is_installed() -> None:
    class Asked(BaseModel):
        messages: list[dict[str, str]]

    take_null_fields_of_messages(Asked)
    once = Asked.__pydantic_core_schema__
    take_null_fields_of_messages(Asked)
    assert Asked.__pydantic_core_schema__ == once
    assert Asked.model_validate({"messages": [{**QUESTION, "name": None}]}).messages == [QUESTION]


def test_null_fields_must_still_be_left_out() -> None:
    with pytest.raises(ValidationError):
        # Otherwise vLLM takes them by itself: drop the patch.
        TypeAdapter(ChatCompletionMessageParam).validate_python({**QUESTION, "name": None})


RIGHT: dict[str, Any] = {"model": "any", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}


@pytest.fixture(scope="module", autouse=True)
def served_requests() -> None:
    fail_at_first_wrong_item(*REQUESTS)


def errors_of(model: type[BaseModel], body: dict[str, Any]) -> int:
    with pytest.raises(ValidationError) as refused:
        model.model_validate(body)
    return refused.value.error_count()


@pytest.mark.parametrize(
    ("model", "body", "field"),
    [
        (ResponsesRequest, {"input": "x"}, "tools"),
        (CompletionRequest, {}, "prompt"),
        *((ChatCompletionRequest, RIGHT, field) for field in ("messages", "tools")),
        *((AnthropicMessagesRequest, RIGHT, field) for field in ("messages", "tools")),
        *((model, RIGHT, "messages") for model in (AnthropicCountTokensRequest, TokenizeChatRequest)),
        (DetokenizeRequest, {}, "tokens"),
    ],
)
def test_1000_wrong_items_have_the_errors_of_one(model: type[BaseModel], body: dict[str, Any], field: str) -> None:
    assert errors_of(model, {**body, field: [{}] * 1000}) == errors_of(model, {**body, field: [{}]})
