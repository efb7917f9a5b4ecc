"""Pushes the weights of verl's `RayPPOTrainer`, for the rollouts of `ServiceAgentLoopManager`. verl is not imported.

    +actor_rollout_ref.rollout.checkpoint_manager_class=rollout_client.trainers.verl_weights.ServiceCheckpointManager
    +actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.rollout_service.folder=/shared/weights
    actor_rollout_ref.actor.checkpoint.save_contents=[hf_model]

Checked against verl's source at commit 1dda039 (0.10.0.dev, FSDP) by a stand-in that calls it as `RayPPOTrainer` does;
not run in verl.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from rollout_client.sync_client.client import RolloutClient
from rollout_client.trainers.verl import plain

SAVED_MODEL = "huggingface"
"""Where verl puts the model of a checkpoint, in the format of transformers."""


class WeightSettings(BaseModel):
    """The config below `checkpoint_engine.engine_kwargs.rollout_service`."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    url: str | None = None
    """Of the service; by default the environment variable `ROLLOUT_URL`. The key is `ROLLOUT_API_KEY`."""
    folder: Path
    """Where the trainer saves its weights, in place of the earlier ones. The first actor and the task runner have to
    see the same folder."""


class ServiceCheckpointManager:
    """Takes the place of verl's checkpoint manager: each update of the weights is a push to the service.

    verl's own engines are put to sleep once, at the start, and are never woken: they keep none of the GPUs' memory
    that they can free.

    The trainer saves what `actor.checkpoint.save_contents` lists, at each update: `hf_model` has to be among it.

    Raises:
        ValueError: the settings are not valid.
    """

    def __init__(self, config: Any, actor_wg: Any, replicas: Sequence[Any]) -> None:
        settings = WeightSettings.model_validate(plain(config.engine_kwargs).get("rollout_service") or {})
        self.client = RolloutClient(settings.url)
        self._folder = settings.folder
        self._actors = actor_wg
        self._awake = list(replicas)

    def sleep_replicas(self) -> None:
        """verl calls it at the start and after each batch."""

        async def sleep() -> None:
            await asyncio.gather(*(replica.sleep() for replica in self._awake))

        asyncio.run(sleep())
        self._awake = []

    def update_weights(self, global_steps: int = 0) -> None:
        """Returns once every replica of the service has the trainer's weights.

        Raises:
            RolloutError: the service cannot be reached or refuses the weights.
            ValueError: the saved model does not fit the service's.
            FileNotFoundError: the trainer has saved no model in the format of transformers.
        """
        model = self._folder / SAVED_MODEL
        for earlier in model.glob("*.safetensors"):
            earlier.unlink()
        self._actors.save_checkpoint(str(self._folder), None, global_steps, max_ckpt_to_keep=None)
        if not any(model.glob("*.safetensors")):
            raise FileNotFoundError(
                f"The trainer has saved no weights in {model}: add hf_model to "
                "actor_rollout_ref.actor.checkpoint.save_contents, and let the task runner see the folder."
            )
        self.client.push_weights(model)
