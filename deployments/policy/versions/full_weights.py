"""Full weights as one file: of the initial checkpoint, or made of a chain of deltas behind a file with full weights.

Version 0 is the checkpoint of the configured model, which every engine loads when it starts. Guarantees: the full
weights of a version are made only when they are needed, once, and only if they have the checksum that the version is
known by; from then on the version needs no other one.
"""

import asyncio
from functools import cached_property
from pathlib import Path
from threading import Lock

from huggingface_hub import snapshot_download

from deployments.policy.failures import VersionUnknown, WeightsRefused
from deployments.policy.replicas.delta_application import write_applied
from deployments.policy.versions.assembly import BASE_REMOVED, write_checkpoint
from deployments.policy.versions.version_store import StoredVersion, VersionStore, make_folder_durably
from deployments.policy.versions.weight_checks import layout_of
from rollout_client.contract.policy import PolicyLayout, VersionInfo
from rollout_client.weights.checksum import file_checksum
from rollout_client.weights.delta import BadDelta
from rollout_client.weights.safetensors_file import NotSafetensors

INITIAL = VersionInfo(version=0, kind="initial")


class InitialVersion:
    """Version 0: the checkpoint of the configured model.

    Args:
        model: folder or hub name of the checkpoint.
        file: where its weights are to lie as one file; it is made when it is first needed.
        max_lora_rank: as in `PolicyLayout`.
        revision: of a model of the Hub.
    """

    def __init__(self, model: str, file: Path, max_lora_rank: int | None = None, revision: str | None = None) -> None:
        self._model = model
        self._revision = revision
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
        return layout_of(model_folder(self._model, self._revision)).model_copy(
            update={"max_lora_rank": self._max_lora_rank}
        )

    @cached_property
    def checksum(self) -> str:
        """Checksum of the initial weights. The first call reads all of `file`; call it from a thread."""
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
                write_checkpoint(model_folder(self._model, self._revision), beside)
                beside.rename(self._file)
        return self._file


def model_folder(model: str, revision: str | None) -> Path:
    """A checkpoint of the hub is downloaded, as the engines do."""
    if Path(model).is_dir():
        return Path(model)
    return Path(snapshot_download(model, revision=revision, allow_patterns=["*.safetensors*"]))


class DeltaChains:
    def __init__(self, store: VersionStore, initial: InitialVersion) -> None:
        self._store = store
        self._initial = initial
        self._making = Lock()

    def links(self, version: int) -> list[int]:
        """The versions that the full weights of `version` are made of: the one with a file first, `version` last.

        `version` alone if it has a file; none if something is missing, as after a transfer.
        """
        links = [version]
        while links[0] and not self._store.weights(links[0]).exists():
            info = self._store.find(links[0])
            if info is None or info.base is None or not self._store.delta(links[0]).exists():
                return []
            links.insert(0, info.base)
        return links

    def bytes_behind(self, version: int) -> int:
        """Size of the deltas that the full weights of `version` would be made of."""
        return sum(self._store.delta(link).stat().st_size for link in self.links(version)[1:])

    def file(self, version: int) -> Path:
        """The full weights, or an adapter; full weights are made if only changes are stored. Call it from a thread.

        Raises:
            VersionUnknown: the version, or one that it needs, is not stored, or no longer.
            WeightsRefused: the deltas make other weights than those that the version is known by.
        """
        if version == 0:
            return self._initial.file()
        path = self._store.weights(version)
        if not path.exists():
            with self._making:
                if not path.exists():
                    self._make(version)
        return path

    def applied(self, base: int, delta: Path, full: Path) -> str:
        """Writes the full weights that `delta` makes of version `base`, and returns their checksum.

        Raises:
            WeightsRefused: the delta does not fit its base, or the base was removed meanwhile.
        """
        try:
            return self._write(base, delta, full)
        except BadDelta as error:
            raise WeightsRefused.of(
                error.tensor, str(error).removeprefix(f"{error.tensor}: ").removesuffix(".")
            ) from error
        except NotSafetensors as error:
            raise WeightsRefused.of("weights", str(error).removesuffix(".")) from error
        except FileNotFoundError as error:
            raise WeightsRefused.of("base", BASE_REMOVED) from error

    def _make(self, version: int) -> None:
        info = self._store.find(version)
        if info is None or info.base is None or not self.links(version):
            raise VersionUnknown.not_stored(version)
        making = self._store.making_weights(version)
        make_folder_durably(making.parent)
        try:
            checksum = self._write(info.base, self._store.delta(version), making)
            if checksum != info.checksum:
                raise other_weights(info, checksum)
            self._store.add_weights(version, making)
        except (BadDelta, NotSafetensors) as error:
            raise WeightsRefused.of("weights", str(error).removesuffix(".")) from error
        except FileNotFoundError as error:
            raise VersionUnknown.not_stored(version) from error
        finally:
            making.unlink(missing_ok=True)

    def _write(self, base: int, delta: Path, full: Path) -> str:
        """Raises `FileNotFoundError` if something of the base was removed meanwhile."""
        root, *links = self.links(base) or [base]
        file = self._store.weights(root) if root else self._initial.file()
        return write_applied(file, [*map(self._store.delta, links), delta], full)


def other_weights(info: StoredVersion, checksum: str) -> WeightsRefused:
    return WeightsRefused.of(
        "checksum",
        f"the delta makes weights with the checksum {checksum} of version {info.base}, and {info.checksum} is expected",
    )
