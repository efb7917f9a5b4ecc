"""Pushes the weights of a transformers `Trainer` to the service, sharded ones included. Needs the extra `trl`."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from accelerate.utils import DistributedType, broadcast_object_list  # type: ignore[import-untyped]

from rollout_client.calls.sync_client.pusher import PolicyPusher
from rollout_client.contract.policy import PushResult
from rollout_client.errors import RolloutError
from rollout_client.weights.torch_tensors import GatheredState

SHARDED = {DistributedType.DEEPSPEED, DistributedType.FSDP}


class WeightsNotPushed(RolloutError):
    """The main process of the trainer could not push its weights; every other process raises this error."""


def push_from_trainer(pusher: PolicyPusher, trainer: Any, policy_name: str | None = None) -> int:
    """Pushes the weights from the trainer's main process and returns their version on every process.

    Of a model of PEFT that is its active adapter, for the full weights that the service has, which have to be those
    under the adapter. Of any other model the first push and those for which it pays are full weights, all others what
    changed; the main process keeps a copy.

    Every process of the trainer must call it: sharded weights (FSDP, DeepSpeed) are gathered by all of them.

    Args:
        policy_name: the named policy that an adapter becomes a version of.

    Raises:
        ValueError: the weights do not fit the service's model, an adapter is sharded, or other weights have a name.
        RolloutError: the push failed. Only the main process raises the cause itself.
        WeightsNotPushed: on every process except the main one, whatever made the push fail.
    """
    push = push_of(pusher, trainer, policy_name)
    outcome: list[int | str] = [0]
    failure: RolloutError | ValueError | None = None
    if trainer.accelerator.is_main_process:
        try:
            outcome = [push().version]
        except (RolloutError, ValueError) as error:
            outcome, failure = [str(error)], error
    [version_or_reason] = broadcast_object_list(outcome, from_process=0)
    if failure is not None:
        raise failure
    if isinstance(version_or_reason, str):
        raise WeightsNotPushed(f"The main process could not push the weights: {version_or_reason}")
    return int(version_or_reason)


def push_of(pusher: PolicyPusher, trainer: Any, policy_name: str | None) -> Callable[[], PushResult]:
    """What the main process calls. Raises `ValueError` as `push_from_trainer` does."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    if not hasattr(model, "peft_config"):
        if policy_name is not None:
            raise ValueError(f"policy_name={policy_name}: a named policy is an adapter, and the trainer trains none.")
        return partial(pusher.push, weights_of(trainer, model))
    if trainer.accelerator.distributed_type in SHARDED:
        raise ValueError(
            "The trainer trains a PEFT adapter whose weights are sharded over processes, which is not pushed from "
            "here: pass push=False, save the adapter at the end of each step, and push its folder."
        )
    return partial(pusher.client.push_weights, model, kind="adapter", name=policy_name)


def weights_of(trainer: Any, model: Any) -> torch.nn.Module | GatheredState:
    """The unwrapped model; for a sharded model its state dict, which all processes gather together."""
    accelerator = trainer.accelerator
    if accelerator.distributed_type in SHARDED:
        return GatheredState(model, accelerator.get_state_dict(trainer.model_wrapped))
    unwrapped: torch.nn.Module = model
    return unwrapped
