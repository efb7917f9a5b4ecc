"""The images of rollouts as a model takes them, beside the tokens of `to_tensors`. Needs torch and Pillow."""

from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rollout_client.contract.messages import Message
from rollout_client.contract.rollouts import RolloutResponse, SampleResult
from rollout_client.results import images_shown
from rollout_client.tensors.rollout_tensors import RolloutTensors

if TYPE_CHECKING:
    from PIL.Image import Image

    from rollout_client.calls.arrow_bodies import ArrowResponse

TOKEN_TYPES = ("mm_token_type_ids", "token_type_ids")
"""Names that processors give the types of tokens: Gemma 3's is the second one, under which others may have zeros."""
OF_TEXT = {"input_ids", "attention_mask", *TOKEN_TYPES}


def image_inputs(
    samples: "RolloutResponse | ArrowResponse | Sequence[SampleResult]",
    tensors: RolloutTensors,
    pictures: Mapping[str, bytes],
    processor: Any,
    rows: Tensor | None = None,
) -> dict[str, Tensor]:
    """The tensors that a model takes beside `input_ids` for the images of the rollouts, in the order of the rows.

    The tokens of the images are in `input_ids` already: the model puts what it sees in their places, and its
    log-probabilities are those of the engine.

    Args:
        samples: those that `tensors` were made of.
        pictures: the content of each image by its name, as `client.image` returns it.
        processor: that of the model, `AutoProcessor.from_pretrained(model)`, with the settings that the engine has. It
            gets each image alone, as in the engine.
        rows: those of `tensors` that the model is given, in the order of `input_ids[rows]`; by default all.

    Returns:
        The tensors that the processor makes of images, such as `pixel_values`, and for models that take positions or
        attention of images from it, as those of Qwen and Gemma, `mm_token_type_ids` or `token_type_ids` [B, T]: 1 for a
        token that stands for a part of an image, by `mm_ranges`, else 0. None if no rollout shows an image.

    Raises:
        KeyError: `pictures` lacks an image.
    """
    listed: Sequence[SampleResult] = samples if isinstance(samples, Sequence) else samples.samples
    places = torch.arange(len(tensors.positions)) if rows is None else rows
    logs = [listed[position].message_log for position in tensors.positions[places].tolist()]
    shown = [[_picture_of(pictures[name])] for log in logs for name in images_shown(log)]
    if not shown:
        return {}
    made = processor(text=[processor.image_token] * len(shown), images=shown, padding=True, return_tensors="pt")
    inputs = {name: value for name, value in made.items() if isinstance(value, Tensor) and name not in OF_TEXT}
    for name in TOKEN_TYPES:
        if name in made and made[name].any():
            inputs[name] = _token_types(processor, tensors.input_ids[places], tensors.attention_mask[places], logs)
    return inputs


def _token_types(processor: Any, ids: Tensor, attention_mask: Tensor, logs: Sequence[Sequence[Message]]) -> Tensor:
    """[B, T]: the type that the processor gives a token of an image, and 0 for all tokens outside of `mm_ranges`."""
    within = torch.zeros_like(ids)
    for row, log, start in zip(within, logs, attention_mask.argmax(dim=1).tolist(), strict=True):
        for message in log:
            for place in message.mm_ranges or ():
                row[start + place.start : start + place.end] = 1
            start += len(message.token_ids)
    # Text of the policy may spell the begin of a video, which would make one of the images behind it.
    return within * torch.tensor(processor.create_mm_token_type_ids((ids * within).tolist()))


def _picture_of(data: bytes) -> "Image":
    """The picture in a file, in RGB, as the engine shows it to the model: upright, as cameras note that in Exif, and on
    white where it is transparent."""
    from PIL import Image, ImageOps

    picture: Image.Image = ImageOps.exif_transpose(Image.open(BytesIO(data)))
    has_layer = picture.mode in ("RGBA", "LA", "PA") or "transparency" in picture.info
    # One color of an RGB file may be declared transparent; vLLM shows it as it is.
    if picture.mode == "RGB" or not has_layer:
        return picture.convert("RGB")
    layer = picture.convert("RGBA")
    paper = Image.new("RGB", layer.size, "white")
    paper.paste(layer, mask=layer.getchannel("A"))
    return paper
