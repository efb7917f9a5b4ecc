"""From what a trainer pushed to a validated version: one file with its weights, or a delta as it is.

A delta is validated without its base: places and values. Whether it makes the weights that its sender says is found out
by the nodes, which apply it. One pass over the data of an upload looks for NaN, computes its checksum and shows whether
the bytes are those that were sent. A stored version was validated when it was pushed.
"""

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from deployments.policy.adapter_checks import config_for_engines, names_for_engines
from deployments.policy.assembly import (
    NotZstd,
    fetch_checkpoint,
    unpack_zstd,
    write_adapter,
    write_applied,
    write_checkpoint,
    write_completed,
    write_renamed,
)
from deployments.policy.disk_delta import DiskDelta, write_patched
from deployments.policy.failures import ChunkDamaged, VersionUnknown, WeightsRefused
from deployments.policy.published import PublishedChain
from deployments.policy.versions import Version, Versions
from deployments.policy.weight_checks import (
    largest_upload_bytes,
    readable_header,
    validate_adapter,
    validate_delta,
    validate_full,
    validate_partial,
)
from rollout_client.contract.policy import WEIGHTS_DIGEST, PolicyLayout, PushOptions, WeightsKind
from rollout_client.weights.checksum import file_digest
from rollout_client.weights.layout import names_in_model
from rollout_client.weights.safetensors_file import Header, NotSafetensors


class PreparedVersion(NamedTuple):
    info: Version
    file: Path
    """Its weights, or what changed since its base, as `info.stored` says."""

    def read_from(self, source: str) -> "PreparedVersion":
        """The same version, which the service has read from `source` itself."""
        return self._replace(info=self.info.model_copy(update={"source": source}))


class VersionPreparation:
    """Prepares versions of one policy, each in a folder for what is assembled. Call it from a thread."""

    def __init__(self, versions: Versions, checkpoint_roots: Sequence[str]) -> None:
        self._versions = versions
        self._checkpoint_roots = checkpoint_roots

    def from_upload(
        self, version: int, options: PushOptions, upload: Path, is_zstd: bool, digest: str | None, folder: Path
    ) -> PreparedVersion:
        """Prepares a version from the bytes that arrived.

        Args:
            upload: the complete bytes; the file itself becomes the version's weights if nothing has to be assembled.
            digest: the `weights_digest` of what was sent, as its sender says.

        Raises:
            ChunkDamaged: what arrived has another digest.
            WeightsRefused: the weights cannot be served, or are not those that their sender says.
            VersionUnknown: the base of a delta or of partial weights is not stored, or no longer.
        """
        pushed = self._unpacked(upload, folder, digest) if is_zstd else upload
        try:
            prepared = self._validated(version, options, pushed, folder)
        except WeightsRefused as refusal:
            # Bytes that were damaged look like bad weights. Only here they are hashed once more, to tell which.
            if digest is not None and (found := _digest_if_readable(pushed)) != digest:
                raise _damaged(digest, found) from refusal
            raise
        if digest not in (None, prepared.info.upload_digest):
            raise _damaged(str(digest), prepared.info.upload_digest)
        return prepared

    def from_checkpoint(self, version: int, options: PushOptions, checkpoint: str, folder: Path) -> PreparedVersion:
        """Prepares a version from a checkpoint that the service reads itself.

        Args:
            checkpoint: path or fsspec URL.

        Raises:
            SourceRefused: the checkpoint lies outside the roots, or cannot be read.
            WeightsRefused, VersionUnknown: as `from_upload` does.
        """
        source = fetch_checkpoint(checkpoint, self._checkpoint_roots, folder / "fetched")
        pushed = folder / "fetched.safetensors"
        write = write_adapter if options.kind == "adapter" else write_checkpoint
        write(source, pushed)
        return self._validated(version, options, pushed, folder).read_from(checkpoint)

    def from_publication(
        self, chain: PublishedChain, options: PushOptions, folder_url: str, folder: Path
    ) -> PreparedVersion:
        """Prepares a version that a trainer has published in a folder.

        Args:
            folder_url: path or fsspec URL of that folder.

        Raises:
            SourceRefused: a file cannot be read, now.
            DeltaRefused: a delta of the chain cannot be used.
            WeightsRefused, VersionUnknown: as `from_upload` does.
        """
        places = {
            link: fetch_checkpoint(link.location, [folder_url], folder / f"fetched-{link.version}")
            for link in chain.links
        }
        changes = [link for link in chain.links if link.base is not None]
        deltas = [DiskDelta.read(link.version, link.base, places[link]) for link in changes]
        if chain.seed is None:
            pushed = folder / "fetched.safetensors"
            write_checkpoint(places[chain.links[0]], pushed)
        else:
            pushed = self._full_weights(chain.seed)
        if deltas:
            base, pushed = pushed, folder / "patched.safetensors"
            write_patched(base, deltas, pushed)
        return self._validated(chain.version, options, pushed, folder).read_from(chain.source)

    def from_stored(self, version: int, source: int, stored_in: Versions, folder: Path) -> PreparedVersion:
        """A version with the weights of `source` in `stored_in`: a hard link of them, not a copy.

        Raises:
            VersionUnknown: the weights of `source` are not stored here, or no longer.
            WeightsRefused: `source` is an adapter for other full weights than the current ones; or `stored_in` is of
                another policy, and `source` no adapter.
        """
        if not stored_in.has_weights(source):
            known = [0, *(info.version for info in stored_in.all if info.stored != "nothing")]
            message = f"its weights are not stored here, or no longer; stored are {', '.join(map(str, known))}"
            raise VersionUnknown.of("to", message, source)
        stored, full = stored_in.find(source), stored_in.desired.full
        is_adapter = stored is not None and stored.kind == "adapter"
        if is_adapter and stored is not None and not stored_in.are_same(stored.base or 0, full):
            message = (
                f"it is an adapter for the weights of version {stored.base}, and those of version {full} are current; "
                f"roll back to {stored.base} first"
            )
            raise WeightsRefused.of("to", message, source)
        if not is_adapter and stored_in is not self._versions:
            message = "a named policy is an adapter, and this version is not one; roll back without a name"
            raise WeightsRefused.of("to", message, source)
        weights = folder / "stored.safetensors"
        os.link(stored_in.file(source), weights)
        info = Version(
            version=version,
            kind="adapter" if is_adapter else "full",
            checksum=stored_in.checksum(source),
            size_bytes=weights.stat().st_size,
            created_at=datetime.now(UTC),
            adapter_config=None if stored is None else stored.adapter_config,
            rollback_of=source,
        )
        return PreparedVersion(info, weights)

    def _unpacked(self, upload: Path, folder: Path, digest: str | None) -> Path:
        pushed = folder / "unpacked.safetensors"
        try:
            unpack_zstd(upload, pushed, largest_upload_bytes(self._versions.initial.layout))
        except NotZstd as error:
            if digest is None:
                raise
            raise _damaged(digest, None) from error
        return pushed

    def _validated(self, version: int, options: PushOptions, pushed: Path, folder: Path) -> PreparedVersion:
        # The base of an adapter is what is current when replicas load it, which is found out then.
        base = None if options.kind == "adapter" else options.base
        if options.kind == "full" and base is not None:
            message = "full weights have no base: a delta, partial weights and an adapter have one"
            raise WeightsRefused.of("base", message, base)
        if options.kind == "delta" and base is None:
            raise WeightsRefused.of("base", "a delta must say which version it changes")
        if options.kind == "partial" and base is None:
            base = self._versions.desired.full
        layout, adapter_config, delta_checksum = self._versions.initial.layout, None, None
        file = named = self._named_as_the_model(options, pushed, folder)
        base_weights = None if base is None else self._full_weights(base)
        whole_bytes = None
        if options.kind == "adapter":
            checksum, adapter_config = validate_adapter(named, layout)
        elif options.kind == "delta" and base_weights is not None:
            delta_checksum = validate_delta(named, layout)
            if options.checksum is not None and base == self._versions.desired.full:
                checksum, whole_bytes = options.checksum, base_weights.stat().st_size
            else:
                file = folder / "made.safetensors"
                checksum = write_applied(base_weights, named, file)
        else:
            if base_weights is not None:
                validate_partial(named, layout)
                file = folder / "made.safetensors"
                write_completed(base_weights, named, file)
            checksum = validate_full(file, layout)
        if options.checksum not in (None, checksum):
            raise WeightsRefused.of("checksum", f"the weights have {checksum}", options.checksum)
        pushed_checksum = delta_checksum or (checksum if file == named else None)
        info = Version(
            version=version,
            kind=options.kind,
            base=base,
            checksum=checksum,
            size_bytes=whole_bytes or file.stat().st_size,
            delta_bytes=None if whole_bytes is None else file.stat().st_size,
            stored="whole" if whole_bytes is None else "delta",
            created_at=datetime.now(UTC),
            upload_digest=file_digest(pushed, pushed_checksum if named == pushed else None),
            adapter_config=adapter_config,
            delta_checksum=None if whole_bytes is None else delta_checksum,
        )
        return PreparedVersion(info, file)

    def _named_as_the_model(self, options: PushOptions, pushed: Path, folder: Path) -> Path:
        """The file, or a copy of it in which tensors have the model's names, without what wrappers added to them."""
        header = readable_header(pushed)
        names = _names_in_the_model(options.kind, header, self._versions.initial.layout)
        if all(name == new for name, new in names.items()):
            return pushed
        if options.kind == "adapter" and (config := header.metadata.get("adapter_config")) is not None:
            config = config_for_engines(config, names)
            header = replace(header, metadata={**header.metadata, "adapter_config": config})
        renamed = folder / "renamed.safetensors"
        write_renamed(pushed, header, names, renamed)
        return renamed

    def _full_weights(self, version: int) -> Path:
        """Raises `WeightsRefused` if the version has no full weights here, and `VersionUnknown` if it is not known."""
        is_adapter = version > 0 and self._versions.info(version).kind == "adapter"
        if is_adapter or not self._versions.has_weights(version):
            raise WeightsRefused.of("base", "the version has no full weights here", version)
        return self._versions.file(version)


def _names_in_the_model(kind: WeightsKind, header: Header, layout: PolicyLayout) -> dict[str, str]:
    """For each tensor of a pushed file the name that the service's model has for it, or its own if there is none.

    Raises:
        WeightsRefused: two of its tensors are one in the model.
    """
    if kind == "adapter":
        names = names_for_engines(header, layout)
    elif kind == "delta":
        parts = {entry.name: entry.name.rpartition(".") for entry in header.entries}
        stems = names_in_model(dict.fromkeys(stem for stem, _, _ in parts.values()), layout.tensors)
        names = {name: f"{stems[stem]}{dot}{part}" for name, (stem, dot, part) in parts.items()}
    else:
        names = names_in_model((entry.name for entry in header.entries), layout.tensors)
    taken = dict[str, str]()
    for name, new in names.items():
        if (other := taken.setdefault(new, name)) != name:
            raise WeightsRefused.of(name, f"{other} is the same tensor of the model, {new}")
    return names


def _digest_if_readable(path: Path) -> str | None:
    with suppress(NotSafetensors):
        return file_digest(path)
    return None


def _damaged(digest: str, found: str | None) -> ChunkDamaged:
    has = "is no longer readable" if found is None else f"has {found}"
    return ChunkDamaged.of(WEIGHTS_DIGEST, f"what arrived {has}; send it again", digest)
