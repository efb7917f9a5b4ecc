"""Pushes the weights of a transformers `Trainer` to the service, sharded ones included. Needs the extra `trl`."""

from typing import Any

import torch
from accelerate.utils import DistributedType, broadcast_object_list  # type: ignore[import-untyped]

from rollout_client.errors import RolloutError
from rollout_client.weights.sync_pusher import PolicyPusher
from rollout_client.weights.torch_tensors import GatheredState

SHARDED = {DistributedType.DEEPSPEED, DistributedType.FSDP}


class WeightsNotPushed(RolloutError):
    """The main process of the trainer could not push its weights; every other process raises this error."""


def push_from_trainer(pusher: PolicyPusher, trainer: Any) -> int:
    """Pushes the weights from the trainer's main process and returns their version on every process.

    The first push and those for which it pays are full weights, all others what changed; the main process keeps a copy.

    Every process of the trainer must call it: sharded weights (FSDP, DeepSpeed) are gathered by all of them.

    Raises:
        ValueError: the trainer trains a PEFT adapter, or its weights do not fit the service's model.
        RolloutError: the push failed. Only the main process raises the cause itself.
        WeightsNotPushed: on every process except the main one, whatever made the push fail.
    """
    source = weights_of(trainer)
    outcome: list[int | str] = [0]
    failure: RolloutError | ValueError | None = None
    if trainer.accelerator.is_main_process:
        try:
            outcome = [pusher.push(source).version]
        except (RolloutError, ValueError) as error:
            outcome, failure = [str(error)], error
    [version_or_reason] = broadcast_object_list(outcome, from_process=0)
    if failure is not None:
        raise failure
    if isinstance(version_or_reason, str):
        raise WeightsNotPushed(f"The main process could not push the weights: {version_or_reason}")
    return int(version_or_reason)


def weights_of(trainer: Any) -> torch.nn.Module | GatheredState:
    """The unwrapped model; for a sharded model its state dict, which all processes gather together."""
    accelerator = trainer.accelerator
    model = accelerator.unwrap_model(trainer.model)
    if hasattr(model, "peft_config"):
        raise ValueError(
            "The trainer trains a PEFT adapter, whose weights are not pushed from here: pass push=False and push them "
            "yourself, for example from a callback at the end of each step."
        )
    if accelerator.distributed_type in SHARDED:
        return GatheredState(model, accelerator.get_state_dict(trainer.model_wrapped))
    unwrapped: torch.nn.Module = model
    return unwrapped
