"""A body of a few kilobytes costs no replica seconds: vLLM's requests are validated up to the first wrong item."""

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError
from vllm.entrypoints.anthropic.protocol import AnthropicCountTokensRequest, AnthropicMessagesRequest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.serve.tokenize.protocol import DetokenizeRequest, TokenizeChatRequest

from deployments.generation.serving.layers import REQUESTS
from deployments.upstream.vllm.request_validation import fail_at_first_wrong_item

# Importing vLLM takes seconds.
pytestmark = pytest.mark.slow
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
        (ResponsesRequest, {}, "input"),
        (ResponsesRequest, {"input": "x"}, "tools"),
        (ChatCompletionRequest, RIGHT, "messages"),
        (CompletionRequest, {}, "prompt"),
        (ChatCompletionRequest, RIGHT, "tools"),
        (AnthropicMessagesRequest, RIGHT, "messages"),
        (AnthropicMessagesRequest, RIGHT, "tools"),
        (AnthropicCountTokensRequest, RIGHT, "messages"),
        (TokenizeChatRequest, RIGHT, "messages"),
        (DetokenizeRequest, {}, "tokens"),
    ],
)
def test_a_thousand_wrong_items_have_the_errors_of_one(
    model: type[BaseModel], body: dict[str, Any], field: str
) -> None:
    assert errors_of(model, {**body, field: [{}] * 1000}) == errors_of(model, {**body, field: [{}]})
