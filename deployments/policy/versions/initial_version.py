"""Version 0: the checkpoint of the configured model, which every engine loads when it starts."""

import asyncio
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from threading import Lock

from huggingface_hub import snapshot_download

from deployments.policy.versions.assembly import write_checkpoint
from deployments.policy.versions.durable_files import make_folder_durably
from deployments.policy.versions.weight_checks import layout_of
from rollout_client.policy_contract import PolicyLayout, VersionInfo
from rollout_client.weights.checksum import file_checksum

INITIAL = VersionInfo(version=0, kind="initial", created_at=datetime.fromtimestamp(0, UTC))


class InitialVersion:
    """
    Args:
        model: folder or hub name of the checkpoint.
        file: where its weights are to lie as one file; it is made when it is first needed.
        max_lora_rank: as in `PolicyLayout`.
    """

    def __init__(self, model: str, file: Path, max_lora_rank: int | None = None) -> None:
        self._model = model
        self._file = file
        self._max_lora_rank = max_lora_rank
        self._making = Lock()

    async def layout(self) -> PolicyLayout:
        """The tensors of the model, which all full weights have.

        Raises:
            NotSafetensors: the model's folder holds no checkpoint.
        """
        return await asyncio.to_thread(lambda: self.layout_on_disk)

    @cached_property
    def layout_on_disk(self) -> PolicyLayout:
        """As `layout`, for callers in a thread."""
        return layout_of(model_folder(self._model)).model_copy(update={"max_lora_rank": self._max_lora_rank})

    @cached_property
    def checksum(self) -> str:
        """Of the initial weights. The first call reads all of `file`; call it from a thread."""
        return file_checksum(self.file())

    def file(self) -> Path:
        """One safetensors file with the initial weights; call it from a thread.

        Raises:
            WeightsRefused: the model's checkpoint cannot be read.
        """
        with self._making:
            if not self._file.exists():
                make_folder_durably(self._file.parent)
                beside = self._file.with_suffix(".new")
                write_checkpoint(model_folder(self._model), beside)
                beside.rename(self._file)
        return self._file


def model_folder(model: str) -> Path:
    """A checkpoint of the hub is downloaded, as the engines do."""
    return Path(model) if Path(model).is_dir() else Path(snapshot_download(model, allow_patterns=["*.safetensors*"]))
