"""The images of rollouts as a model takes them, beside the tokens of `to_tensors`. Needs torch and Pillow."""

from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from typing import TYPE_CHECKING, Any

from torch import Tensor

from rollout_client.contract.rollouts import RolloutResponse, SampleResult
from rollout_client.results import images_shown
from rollout_client.tensors.rollout_tensors import MergedTensors, RolloutTensors

if TYPE_CHECKING:
    from rollout_client.calls.arrow_bodies import ArrowResponse


def image_inputs(
    samples: "RolloutResponse | ArrowResponse | Sequence[SampleResult]",
    tensors: RolloutTensors,
    pictures: Mapping[str, bytes],
    image_processor: Callable[..., Mapping[str, Any]],
    rows: Tensor | None = None,
) -> dict[str, Tensor]:
    """The tensors that a model takes beside `input_ids` for the images of the rollouts, in the order of the rows.

    The tokens of the images are in `input_ids` already: the model puts what it sees in their places, and its
    log-probabilities are those of the engine.

    Args:
        samples: those that `tensors` were made of.
        pictures: the content of each image by its name, as `client.image` returns it.
        image_processor: that of the model, such as `AutoProcessor.from_pretrained(model).image_processor`, with the
            settings that the engine has.
        rows: those of `tensors` that the model is given, in the order of `input_ids[rows]`; by default all.

    Returns:
        The tensors that the processor makes, such as `pixel_values`; none if no rollout shows an image.

    Raises:
        KeyError: `pictures` lacks an image.
        ValueError: `tensors` are merged, which have no row of its own for each rollout.
    """
    from PIL import Image

    if isinstance(tensors, MergedTensors):
        raise ValueError("Images have no place in merged rows: call to_tensors without merge.")

    listed: Sequence[SampleResult] = samples if isinstance(samples, Sequence) else samples.samples
    shown = []
    for position in (tensors.positions if rows is None else tensors.positions[rows]).tolist():
        if names := images_shown(listed[position].message_log):
            shown.append([Image.open(BytesIO(pictures[name])).convert("RGB") for name in names])
    if not shown:
        return {}
    made = image_processor(images=shown, return_tensors="pt")
    return {name: value for name, value in made.items() if isinstance(value, Tensor)}
