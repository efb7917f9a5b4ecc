"""Which tokens of a posted message may stand for images."""

from typing import Any

import pytest
from pydantic import ValidationError

from rollout_client.contract.messages import GivenMessage

NAME = "sha256:" + "0" * 64
FIRST, SECOND = {"media": NAME, "start": 0, "end": 2}, {"media": NAME, "start": 2, "end": 3}


def posted(*ranges: dict[str, Any], **fields: Any) -> GivenMessage:
    message = {"role": "assistant", "content": "", "token_ids": [5, 6, 7], "mm_ranges": [*ranges], **fields}
    return GivenMessage.model_validate(message)


def test_ranges_of_images_follow_each_other_within_their_message() -> None:
    assert [(shown.start, shown.end) for shown in posted(FIRST, SECOND).mm_ranges or ()] == [(0, 2), (2, 3)]
    for ranges in ([SECOND, FIRST], [FIRST, FIRST], [FIRST | {"end": 4}], [FIRST | {"end": 0}]):
        with pytest.raises(ValidationError, match="send ranges in order, which do not overlap"):
            posted(*ranges)


def test_no_generated_token_stands_for_an_image() -> None:
    generated = {"generation_logprobs": [-1.0, -1.0, -1.0], "finish_reason": "stop"}
    assert posted(**generated).mm_ranges == []
    with pytest.raises(ValidationError, match="mm_ranges of tokens that were generated: no sampled token stands for"):
        posted(FIRST, **generated)
