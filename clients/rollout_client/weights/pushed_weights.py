"""Copy of the weights of the last push, from which the next push computes a delta. No I/O. Needs numpy.

It takes the host memory of one copy of the weights, in the service's dtypes, and during a push that of the changes.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from rollout_client.contract.policy import PolicyState, PolicyUpdate, Version, WeightsKind
from rollout_client.errors import WeightsDiffer
from rollout_client.weights.checksum import ThreadedChecksum
from rollout_client.weights.delta import TensorChanges, apply_changes, as_bits, delta_weights, encode_changes
from rollout_client.weights.safetensors_file import Data, Header, Weights


@dataclass(frozen=True, slots=True)
class CapturedWeights:
    """A copy of a source's weights, ready to be sent, also more than once. The source may change from now on."""

    weights: Weights
    base: Version | None
    """The version that a delta changes; `None` for full weights."""
    checksum: str | None
    """The `Checksum` of all tensors; `None` without verification."""
    changes: dict[str, TensorChanges] = field(default_factory=dict)
    """Changes of a delta by tensor; empty for full weights."""
    is_partial: bool = False
    """Whether the service has tensors that are not among these."""

    @property
    def kind(self) -> WeightsKind:
        return "delta" if self.base is not None else "partial" if self.is_partial else "full"


class PushedWeights:
    """The weights that the service has, as far as this client knows.

    Args:
        is_verified: compare checksums with the service's; each push then computes a sha-256 over all weights.
        is_partial: captures hold only some of the service's tensors, whose checksum is not that of a version.
    """

    def __init__(self, is_verified: bool = True, is_partial: bool = False) -> None:
        self._is_verified = is_verified and not is_partial
        self._is_partial = is_partial
        self._version: Version | None = None
        """The service's version of `_tensors`; `None` before the first push, and where they may differ."""
        self._checksum: str | None = None
        self._header = Header(())
        self._tensors: dict[str, bytearray] = {}

    def check(self, state: PolicyState) -> None:
        """Forgets the version if it is no longer the service's current one, or has another checksum there."""
        checksums = {info.version: info.checksum for info in state.versions}
        is_same = self._checksum is None or checksums.get(state.current) in {None, self._checksum}
        if self._version != state.current or state.current not in checksums or not is_same:
            self.forget()

    def forget(self) -> None:
        """The next capture is full weights."""
        self._version = None

    def capture(self, weights: Weights) -> CapturedWeights:
        """Reads `weights` once. Returns the changes since the last push, or full weights where these are smaller."""
        if weights.header.entries != self._header.entries:
            self.forget()
            self._header = weights.header
            self._tensors = {entry.name: bytearray(entry.size_bytes) for entry in weights.header.entries}
        with ThreadedChecksum() as checksum:
            changes = self._read(weights, checksum if self._is_verified else None)
            digest = checksum.hexdigest() if self._is_verified else None
        if self._version is None:
            full = Weights(self._header, lambda entry: iter([memoryview(self._tensors[entry.name])]), checksum=digest)
            return CapturedWeights(full, None, digest, is_partial=self._is_partial)
        return CapturedWeights(delta_weights(changes, self._header), self._version, digest, changes)

    def _read(self, weights: Weights, checksum: ThreadedChecksum | None) -> dict[str, TensorChanges]:
        """The changes; none if full weights are smaller, which then are the copy."""
        changes: dict[str, TensorChanges] = {}
        changed_bytes = 0
        for entry in weights.header.entries:
            new = _joined(weights.read(entry))
            if checksum is not None:
                checksum.add(entry.name, entry.dtype, entry.shape, new)
            if self._version is None:
                self._tensors[entry.name][:] = new
                continue
            found = encode_changes(as_bits(entry.dtype, self._tensors[entry.name]), as_bits(entry.dtype, new))
            if found.gaps.size:
                changes[entry.name] = found
            changed_bytes += found.size_bytes
            if changed_bytes >= weights.header.file_bytes:
                # A delta would be larger than full weights. The rest of this same reading only updates the copy.
                self._apply(changes)
                self.forget()
        return changes

    def confirm(self, captured: CapturedWeights, update: PolicyUpdate) -> None:
        """Records that the service serves `captured` as the version of `update`.

        Raises:
            WeightsDiffer: the service's checksum differs; the next capture is full weights.
        """
        self._apply(captured.changes)
        self._version = update.version
        self._checksum = captured.checksum
        if None not in {captured.checksum, update.checksum} and captured.checksum != update.checksum:
            self.forget()
            raise WeightsDiffer(
                f"Version {update.version} has checksum {update.checksum} at the service and {captured.checksum} here: "
                "its rollouts are of other weights. Push again; full weights are sent then."
            )

    def _apply(self, changes: dict[str, TensorChanges]) -> None:
        dtypes = {entry.name: entry.dtype for entry in self._header.entries}
        for name, changed in changes.items():
            apply_changes(name, as_bits(dtypes[name], self._tensors[name]), changed)
        changes.clear()


def _joined(blocks: Iterator[Data]) -> Data:
    """All `blocks` as one; a single block is not copied."""
    first = next(blocks, b"")
    rest = list(blocks)
    return b"".join([first, *rest]) if rest else first
