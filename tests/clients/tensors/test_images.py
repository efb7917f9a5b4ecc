"""The images of rollouts beside the tokens of `to_tensors`."""

from typing import Any

import pytest
import torch

from rollout_client import SampleResult
from rollout_client.results import token_row
from rollout_client.tensors import image_inputs, images_shown, to_tensors
from tests.clients.scripted_service import result
from tests.deployments.images.pictures import picture

PICTURES = {f"sha256:{digit * 64}": picture(color) for digit, color in (("0", "red"), ("1", "blue"))}
RED, BLUE = PICTURES


def played(generation: int, *names: str, reward: float | None = 1.0) -> SampleResult:
    """A rollout that shows these images, in one message each."""
    asked = [
        {"role": "user", "content": "", "token_ids": [5, 6], "mm_ranges": [{"media": name, "start": 0, "end": 2}]}
        for name in names
    ]
    said = {"role": "assistant", "content": "", "token_ids": [7], "generation_logprobs": [-0.5]}
    log = [*asked, {"role": "user", "content": "", "token_ids": [4]}, said | {"finish_reason": "stop"}]
    return SampleResult.model_validate(result(0, generation, message_log=log, total_reward=reward))


class FirstPixels:
    """A processor that makes one pixel of each image, and `types` for each token of a text."""

    image_token = "<image>"

    def __init__(self, **types: int) -> None:
        self._types = types

    def __call__(self, text: list[str], images: list[list[Any]], padding: bool, return_tensors: str) -> dict[str, Any]:
        assert (padding, return_tensors) == (True, "pt")
        assert text == [self.image_token] * len(images)
        of_text = {name: torch.full((len(text), 2), value) for name, value in self._types.items()}
        pixels = torch.tensor([picture.getpixel((0, 0)) for [picture] in images])
        return {"pixels": pixels, "rows": ["text"], "input_ids": 1, "attention_mask": torch.ones(2), **of_text}

    def create_mm_token_type_ids(self, input_ids: list[list[int]]) -> list[list[int]]:
        """A part of an image is 6, and 8 begins a video."""
        return [[(2 if 8 in row else 1) * (token_id == 6) for token_id in row] for row in input_ids]


def test_the_images_are_in_the_order_of_the_rows_that_show_some() -> None:
    lost = played(3, BLUE, reward=None)
    samples = [played(0, RED, BLUE), lost, played(1), played(2, RED)]
    inputs = image_inputs(samples, to_tensors(samples, pad_token_id=0), PICTURES, FirstPixels(token_type_ids=0))
    assert list(inputs) == ["pixels"]
    assert inputs["pixels"].tolist() == [[255, 0, 0], [0, 0, 255], [255, 0, 0]]
    assert images_shown(samples[0].message_log) == [RED, BLUE]
    assert image_inputs([played(0)], to_tensors([played(0)], pad_token_id=0), {}, FirstPixels()) == {}


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["mm_token_type_ids", "token_type_ids"])
def test_the_tokens_of_images_are_marked_where_the_processor_marks_them(side: Any, name: str) -> None:
    processor = FirstPixels(**{name: 1})
    samples = [played(0, RED, BLUE), played(1), played(2, RED)]
    tensors = to_tensors(samples, pad_token_id=0, padding_side=side)
    # The policy has sampled the token itself, which is a token of text then.
    tensors.input_ids[tensors.input_ids == 7] = 6
    inputs = image_inputs(samples, tensors, PICTURES, processor)
    padded = [[0, 0] if row == 2 else [0] * 4 if row else [] for row in range(3)]
    marked = [[0, 1, 0, 1, 0, 0], [0, 0], [0, 1, 0, 0]]
    rows = [pad + row if side == "left" else row + pad for pad, row in zip(padded, marked, strict=True)]
    assert inputs[name].tolist() == rows
    some = image_inputs(samples, tensors, PICTURES, processor, torch.tensor([2, 0]))
    assert some[name].tolist() == [rows[2], rows[0]]


def test_an_image_is_one_whatever_the_policy_has_written_before_it() -> None:
    sample = played(0, RED)
    sample.message_log.insert(0, sample.message_log[-1].model_copy(update={"token_ids": [8]}))
    inputs = image_inputs([sample], to_tensors([sample], pad_token_id=0), PICTURES, FirstPixels(mm_token_type_ids=1))
    assert inputs["mm_token_type_ids"].tolist() == [[0, 0, 1, 0, 0]]


def test_a_row_of_tokens_has_no_place_for_images() -> None:
    with pytest.raises(ValueError, match="A rollout shows images, and a row of tokens has none"):
        token_row(played(0, RED))
