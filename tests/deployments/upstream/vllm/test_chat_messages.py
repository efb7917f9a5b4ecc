"""Messages with fields that are null, with and without the patch."""

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError
from vllm.renderers.chat_utils import ChatCompletionMessageParam

from deployments.upstream.vllm.request_validation import take_null_fields_of_messages

# Importing vLLM takes seconds.
pytestmark = pytest.mark.slow
QUESTION = {"role": "user", "content": "2 + 3?"}


def test_null_fields_are_left_out_once_however_often_the_patch_is_installed() -> None:
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
