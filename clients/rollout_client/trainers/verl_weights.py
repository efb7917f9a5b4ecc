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

from rollout_client.calls.sync_client.client import RolloutClient
from rollout_client.trainers.verl import plain

SAVED_MODEL = "huggingface"
"""Folder of verl's checkpoints with the model in the format of transformers."""
PUSHED = "pushed"
"""The folder below that of the settings. verl removes it when it counts as an old checkpoint, and nothing beside it."""


class WeightSettings(BaseModel):
    """The config below `checkpoint_engine.engine_kwargs.rollout_service`."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    url: str | None = None
    """Address of the service; by default the environment variable `ROLLOUT_URL`. The key is `ROLLOUT_API_KEY`."""
    folder: Path
    """Folder for the trainer's weights, which replace earlier ones. The first actor and the task runner must see the
    same folder."""


class CheckpointSaves:
    """Saves through verl's actors, so that pushes do not count towards `max_actor_ckpt_to_keep`.

    Each save is one more in the actors' list of checkpoints, of which verl keeps the last ones and removes the folders
    of the others. verl offers no hook, so this replaces `save_checkpoint` of the worker group, tracks which saves are
    pushes, and asks verl to keep as many more as there are pushes among the trainer's last ones.
    """

    def __init__(self, actor_wg: Any) -> None:
        self._save = actor_wg.save_checkpoint
        self._are_checkpoints: list[bool] = []
        actor_wg.save_checkpoint = self.save_checkpoint

    def save_for_push(self, folder: Path, global_steps: int) -> None:
        self._save(str(folder), None, global_steps, max_ckpt_to_keep=None)
        self._are_checkpoints.append(False)

    def save_checkpoint(self, *where: Any, max_ckpt_to_keep: int | None = None, **options: Any) -> Any:
        """A checkpoint of the trainer's own; as verl's method of this name."""
        if max_ckpt_to_keep is not None and max_ckpt_to_keep > 0:
            self._are_checkpoints = self._kept_beside(max_ckpt_to_keep)
            max_ckpt_to_keep = len(self._are_checkpoints) + 1
        answer = self._save(*where, max_ckpt_to_keep=max_ckpt_to_keep, **options)
        self._are_checkpoints.append(True)
        return answer

    def _kept_beside(self, max_ckpt_to_keep: int) -> list[bool]:
        """The saves that remain beside the next one, so that the trainer has `max_ckpt_to_keep` checkpoints."""
        if max_ckpt_to_keep == 1:
            # The number 1 has verl remove the others when the next one is written, not before.
            return []
        own = [place for place, is_checkpoint in enumerate(self._are_checkpoints) if is_checkpoint]
        first_kept = own[-max_ckpt_to_keep] + 1 if len(own) >= max_ckpt_to_keep else 0
        return self._are_checkpoints[first_kept:]


class ServiceCheckpointManager:
    """Takes the place of verl's checkpoint manager: each update of the weights is a push to the service.

    verl's own engines are put to sleep once, at the start, and are never woken: they keep none of the GPUs' memory
    that they can free.

    The trainer saves what `actor.checkpoint.save_contents` lists, at each update: it must include `hf_model`. These
    saves do not count towards `max_actor_ckpt_to_keep`.

    Raises:
        ValueError: the settings are not valid.
    """

    def __init__(self, config: Any, actor_wg: Any, replicas: Sequence[Any]) -> None:
        settings = WeightSettings.model_validate(plain(config.engine_kwargs).get("rollout_service") or {})
        self.client = RolloutClient(settings.url)
        self._folder = settings.folder / PUSHED
        self._saves = CheckpointSaves(actor_wg)
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
        self._saves.save_for_push(self._folder, global_steps)
        if not any(model.glob("*.safetensors")):
            raise FileNotFoundError(
                f"The trainer has saved no weights in {model}: add hf_model to "
                "actor_rollout_ref.actor.checkpoint.save_contents, and let the task runner see the folder."
            )
        self.client.push_weights(model)
