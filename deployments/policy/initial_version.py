"""Version 0: the checkpoint of the configured model, which every engine loads when it starts."""

import asyncio
from functools import cached_property
from pathlib import Path
from threading import Lock

from huggingface_hub import snapshot_download

from deployments.policy.assembly import write_checkpoint
from deployments.policy.durable_files import flush, make_folder_durably
from deployments.policy.weight_checks import layout_of
from rollout_client.contract.policy import PolicyLayout, VersionInfo
from rollout_client.weights.checksum import file_checksum

INITIAL = VersionInfo(version=0, kind="initial")


def initial_file(folder: Path) -> Path:
    """Where version 0 lies as one file, in the policy store's folder."""
    return folder / "versions" / "0.safetensors"


class InitialVersion:
    """Version 0.

    Args:
        model: folder or hub name of the checkpoint.
        folder: the policy store's.
        max_lora_rank: as in `PolicyLayout`.
        revision: of a model of the Hub.
    """

    def __init__(self, model: str, folder: Path, max_lora_rank: int | None = None, revision: str | None = None) -> None:
        self._model = model
        self._revision = revision
        self._file = initial_file(folder)
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
        return layout_of(_model_folder(self._model, self._revision)).model_copy(
            update={"max_lora_rank": self._max_lora_rank}
        )

    @cached_property
    def checksum(self) -> str:
        """Checksum of the initial weights. The first call reads all of `file`; call it from a thread."""
        return file_checksum(self.file())

    def file(self) -> Path:
        """One safetensors file with the initial weights, made at the first call; call it from a thread.

        Raises:
            WeightsRefused: the model's checkpoint cannot be read.
        """
        with self._making:
            if not self._file.exists():
                make_folder_durably(self._file.parent)
                beside = self._file.with_suffix(".new")
                write_checkpoint(_model_folder(self._model, self._revision), beside)
                flush(beside)
                beside.rename(self._file)
        return self._file


def _model_folder(model: str, revision: str | None) -> Path:
    """A checkpoint of the hub is downloaded, as the engines do."""
    if Path(model).is_dir():
        return Path(model)
    return Path(snapshot_download(model, revision=revision, allow_patterns=["*.safetensors*"]))
