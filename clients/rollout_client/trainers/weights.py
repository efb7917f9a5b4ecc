"""The weights of a trainer on their way to the service. Needs the extra `trl`."""

from collections.abc import Mapping
from typing import Any

import torch
from accelerate.utils import DistributedType, broadcast_object_list  # type: ignore[import-untyped]

from rollout_client.client import RolloutClient
from rollout_client.errors import RolloutError

SHARDED = {DistributedType.DEEPSPEED, DistributedType.FSDP}


class WeightsNotPushed(RolloutError):
    """The main process of the trainer could not push its weights; this is what the other processes raise."""


def push_from_trainer(client: RolloutClient, trainer: Any) -> int:
    """Pushes the weights of a transformers `Trainer` from its main process and returns their version on every process.

    All processes must call it. Sharded weights (FSDP, DeepSpeed) are gathered first.

    Raises `ValueError` for a PEFT model. If the push fails, the main process raises what it raised, and the others
    `WeightsNotPushed`.
    """
    source = weights_of(trainer)
    outcome: list[int | str] = [0]
    failure: RolloutError | ValueError | None = None
    if trainer.accelerator.is_main_process:
        try:
            outcome = [client.push_weights(source).version]
        except (RolloutError, ValueError) as error:
            outcome, failure = [str(error)], error
    [said] = broadcast_object_list(outcome, from_process=0)
    if failure is not None:
        raise failure
    if isinstance(said, str):
        raise WeightsNotPushed(f"The main process could not push the weights: {said}")
    return int(said)


def weights_of(trainer: Any) -> torch.nn.Module | Mapping[str, torch.Tensor]:
    """The bare model, or the state dict of a sharded one, which all processes gather together."""
    accelerator = trainer.accelerator
    model = accelerator.unwrap_model(trainer.model)
    if hasattr(model, "peft_config"):
        raise ValueError(
            "The trainer trains a PEFT adapter, whose weights are not pushed from here: pass push=False and push them "
            "yourself, for example from a callback at the end of each step."
        )
    if accelerator.distributed_type in SHARDED:
        state: Mapping[str, torch.Tensor] = accelerator.get_state_dict(trainer.model_wrapped)
        return state
    bare: torch.nn.Module = model
    return bare
