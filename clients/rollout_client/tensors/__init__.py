"""Rollouts as the padded tensors of a training step: `to_tensors`. Needs the extra `torch`."""

from rollout_client.tensors.rollout_tensors import NotFinal, PaddingSide, RolloutTensors, to_tensors

__all__ = ["NotFinal", "PaddingSide", "RolloutTensors", "to_tensors"]
