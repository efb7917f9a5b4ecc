"""Rollouts as the padded tensors of a training step: `to_tensors`. Needs the extra `torch`."""

from rollout_client.results import images_shown as images_shown
from rollout_client.tensors.credit import Credit as Credit
from rollout_client.tensors.credit import turn_advantages as turn_advantages
from rollout_client.tensors.images import image_inputs as image_inputs
from rollout_client.tensors.included import logprobs_within as logprobs_within
from rollout_client.tensors.padding import PaddingSide as PaddingSide
from rollout_client.tensors.rollout_tensors import NotFinal as NotFinal
from rollout_client.tensors.rollout_tensors import RolloutTensors as RolloutTensors
from rollout_client.tensors.rollout_tensors import to_tensors as to_tensors
