"""The weights that the service has: version 0, stored versions, and what a replica lacks.

All of it reads and writes files, so the policy store calls what takes long from a thread.
"""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any

from huggingface_hub import snapshot_download

from deployments.policy.commands import LoadedWeights, VersionPayload
from deployments.policy.failures import WeightsRefused
from deployments.policy.validation import checked_adapter, checked_full, layout_of, write_applied, write_checkpoint
from deployments.policy.version_store import StoredVersion, VersionStore
from rollout_client.policy_contract import PolicyLayout, PushOptions, VersionInfo
from rollout_client.problem_contract import FieldProblem

CHUNK_BYTES = 64 * 2**20


class PolicyWeights:
    """
    Args:
        model: folder or hub name of the checkpoint that engines begin with, version 0.
        put: gives a reference to a piece, which replicas on every node can await.
    """

    def __init__(self, version_store: VersionStore, model: str, put: Callable[[bytes], Any]) -> None:
        self._version_store = version_store
        self._model = model
        self._put = put
        self._making_initial = Lock()

    @cached_property
    def layout(self) -> PolicyLayout:
        """The tensors of version 0, which all full weights have."""
        return layout_of(model_folder(self._model))

    def versions(self) -> list[VersionInfo]:
        """In order of their numbers, version 0 first."""
        return [initial_version(), *(known_of(stored) for stored in self._version_store.versions())]

    @property
    def due(self) -> LoadedWeights:
        """What every replica is to hold: the current full weights, and the current adapter on top of them, if any."""
        current = self._version_store.current()
        if current == 0:
            return LoadedWeights()
        info = self._version_store.info(current)
        return LoadedWeights(info.base or 0, current) if info.kind == "adapter" else LoadedWeights(current)

    def checked(
        self, version: int, options: PushOptions, arrived: Path, folder: Path, upload_digest: str | None
    ) -> tuple[StoredVersion, Path]:
        """What arrived as the version that may be served, and where its weights lie: `arrived`, or in `folder`.

        Raises:
            WeightsRefused: it may not be.
            VersionUnknown: it changes a version that is not here, or no longer.
        """
        if options.kind != "delta" and options.base is not None:
            message = f"only a delta has a base, and these weights are {options.kind}"
            raise WeightsRefused(FieldProblem(field="base", message=message, value=options.base))
        adapter_config: str | None = None
        weights = arrived
        if options.kind == "adapter":
            checksum, adapter_config = checked_adapter(arrived)
        else:
            if options.kind == "delta":
                weights = folder / "applied.safetensors"
                write_applied(self._base_of(options), arrived, weights)
            checksum = checked_full(weights, self.layout)
        info = StoredVersion(
            version=version,
            kind=options.kind,
            base=options.base,
            checksum=checksum,
            size_bytes=weights.stat().st_size,
            created_at=datetime.now(UTC),
            upload_digest=upload_digest,
            adapter_config=adapter_config,
        )
        return info, weights

    def payloads_for(self, loaded: LoadedWeights) -> Sequence[VersionPayload] | None:
        """What a replica that holds `loaded` lacks of the current version; `None` if that is not here."""
        due = self.due
        if loaded == due:
            return []
        payloads = []
        if loaded.full != due.full or due.adapter is None:
            if due.full and self._version_store.info(due.full).kind == "transfer":
                return None
            payloads.append(self.payload(self._version_store.info(due.full) if due.full else initial_version()))
        if due.adapter is not None:
            payloads.append(self.payload(self._version_store.info(due.adapter)))
        return payloads

    def payload(self, info: VersionInfo) -> VersionPayload:
        """Puts the weights into Ray's object store once; replicas of every node fetch them from there."""
        with self._file_of(info.version).open("rb") as file:
            pieces = tuple(self._put(piece) for piece in iter(lambda: file.read(CHUNK_BYTES), b""))
        if isinstance(info, StoredVersion) and info.kind == "adapter":
            return VersionPayload(info.version, "adapter", pieces, info.adapter_config)
        return VersionPayload(info.version, "full", pieces)

    def keep_newest(self, full_versions: int) -> None:
        """Removes all versions but the newest `full_versions` with full weights here, and what replicas are to hold."""
        due = self.due
        full = [stored.version for stored in self._version_store.versions() if stored.kind in ("full", "delta")]
        self._version_store.keep_only({due.version, due.full, *full[-full_versions:]})

    def _base_of(self, options: PushOptions) -> Path:
        if options.base is None:
            raise WeightsRefused(FieldProblem(field="base", message="a delta must say which version it changes"))
        if options.base != 0 and self._version_store.info(options.base).kind in ("adapter", "transfer"):
            raise WeightsRefused(
                FieldProblem(field="base", message="the version has no full weights here", value=options.base)
            )
        return self._file_of(options.base)

    def _file_of(self, version: int) -> Path:
        """Version 0 lies with the model, perhaps in several files; it becomes one here when it is first needed."""
        weights = self._version_store.weights(version)
        if version == 0:
            with self._making_initial:
                if not weights.exists():
                    self._make_initial(weights)
        return weights

    def _make_initial(self, weights: Path) -> None:
        beside = self._version_store.folder / "initial.safetensors"
        weights.parent.mkdir(parents=True, exist_ok=True)
        write_checkpoint(model_folder(self._model), beside)
        beside.rename(weights)


def model_folder(model: str) -> Path:
    """Where the checkpoint lies; one of the hub is fetched, as the engines do."""
    return Path(model) if Path(model).is_dir() else Path(snapshot_download(model, allow_patterns=["*.safetensors*"]))


def initial_version() -> VersionInfo:
    return VersionInfo(version=0, kind="initial", created_at=datetime.fromtimestamp(0, UTC))


def known_of(stored: StoredVersion) -> VersionInfo:
    return VersionInfo(**{name: getattr(stored, name) for name in VersionInfo.model_fields})
