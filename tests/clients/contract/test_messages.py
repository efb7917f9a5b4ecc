"""Parts of a message's content as columns of Parquet and Arrow have them: each with the fields of all kinds."""

from typing import Any

import pyarrow as pa
import pytest
from pydantic import ValidationError

from rollout_client.contract.messages import MOST_PARTS, ImagePart, PromptMessage, TextPart

RED = f"sha256:{'0a' * 32}"


def test_parts_that_come_back_from_a_column_are_those_that_went_in() -> None:
    parts = [{"type": "image", "image": RED}, {"type": "text", "text": "Which?"}]
    [found] = pa.array([parts]).to_pylist()
    assert found == [{"type": "image", "image": RED, "text": None}, {"type": "text", "image": None, "text": "Which?"}]
    message = PromptMessage.model_validate({"role": "user", "content": found})
    assert message.content == [ImagePart(type="image", image=RED), TextPart(type="text", text="Which?")]
    assert message.model_dump(exclude_unset=True) == {"role": "user", "content": parts}


@pytest.mark.parametrize(
    "parts",
    [
        [{"type": "text", "text": None}],
        [{"type": "image", "image": None}],
        [{"type": "text", "text": "a", "image": RED}],
        [{"type": "text", "text": "a", "image_url": None}],
        [{"type": ["text"], "text": "a", "image": None}],
        [{"type": "text", "text": "a", "image": None}] * (MOST_PARTS + 1),
    ],
)
def test_other_fields_and_too_many_parts_are_refused_as_before(parts: list[Any]) -> None:
    with pytest.raises(ValidationError, match="Input should be a text, or a list of parts"):
        PromptMessage.model_validate({"role": "user", "content": parts})
