"""Rollouts as the padded tensors of a training step: `to_tensors`. Needs the extra `torch`."""

from rollout_client.results import images_shown
from rollout_client.tensors.credit import Credit, turn_advantages
from rollout_client.tensors.images import image_inputs
from rollout_client.tensors.included import logprobs_within
from rollout_client.tensors.padding import PaddingSide
from rollout_client.tensors.rollout_tensors import NotFinal, RolloutTensors, to_tensors

__all__ = [
    "Credit",
    "NotFinal",
    "PaddingSide",
    "RolloutTensors",
    "image_inputs",
    "images_shown",
    "logprobs_within",
    "to_tensors",
    "turn_advantages",
]
