"""The weights as the service has them, in host memory, so that new ones can be said as what changed. No I/O.

Needs numpy. It holds one copy of the weights in the service's dtypes, and while a push is under way what changed.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from rollout_client.errors import WeightsDiffer
from rollout_client.policy_contract import PolicyState, PolicyUpdate, Version, WeightsKind
from rollout_client.weights.delta import Changes, bits, decode, encode, packed
from rollout_client.weights.safetensors_file import Checksum, Data, Header, TensorEntry
from rollout_client.weights.sources import Weights


@dataclass(frozen=True, slots=True)
class CapturedWeights:
    """Weights taken from a source, which may change from then on; ready to be sent once or again."""

    weights: Weights
    base: Version | None
    """The version that they change; without one they are full weights."""
    checksum: str | None
    """Sha-256 over all tensors (`safetensors_file.Checksum`); `None` where it was not asked for."""
    changes: dict[str, Changes] = field(default_factory=dict)

    @property
    def kind(self) -> WeightsKind:
        return "full" if self.base is None else "delta"


class Mirror:
    """
    Args:
        is_verified: whether checksums are compared with the service's, at the cost of a sha-256 over all weights each
            time.
    """

    def __init__(self, is_verified: bool = True) -> None:
        self._is_verified = is_verified
        self._version: Version | None = None
        """What `_tensors` is at the service; unknown before the first push and after one that failed."""
        self._checksum: str | None = None
        self._header = Header(())
        self._tensors: dict[str, bytearray] = {}

    def check(self, state: PolicyState) -> None:
        """Forgets what the service has where that is no longer current there, or not the same."""
        held = {info.version: info.checksum for info in state.versions}
        is_same = self._checksum is None or held.get(state.current) in {None, self._checksum}
        if self._version != state.current or state.current not in held or not is_same:
            self.forget()

    def forget(self) -> None:
        """Full weights come next."""
        self._version = None

    def take(self, weights: Weights) -> CapturedWeights:
        """Reads `weights` once: what changed since the last push or, where that is not smaller, all of them."""
        if weights.header.entries != self._header.entries:
            self.forget()
            self._header = weights.header
            self._tensors = {entry.name: bytearray(entry.size_bytes) for entry in weights.header.entries}
        checksum = Checksum() if self._is_verified else None
        changes: dict[str, Changes] = {}
        changed_bytes = 0
        for entry in weights.header.entries:
            new = whole(weights.read(entry))
            if checksum is not None:
                checksum.add(entry.name, entry.dtype, entry.shape, [new])
            if self._version is None:
                self._tensors[entry.name][:] = new
                continue
            found = encode(bits(entry.dtype, self._tensors[entry.name]), bits(entry.dtype, new))
            if found.gaps.size:
                changes[entry.name] = found
            changed_bytes += found.size_bytes
            if changed_bytes >= weights.header.file_bytes:
                # Not worth it: from here on this is a copy for full weights, in the same reading of the source.
                self._apply(changes)
                self.forget()
        digest = None if checksum is None else checksum.hexdigest()
        if self._version is None:
            return CapturedWeights(Weights(self._header, self._read), None, digest)
        return CapturedWeights(packed(changes, self._header), self._version, digest, changes)

    def confirm(self, taken: CapturedWeights, update: PolicyUpdate) -> None:
        """`taken` is at the service as `update` says.

        Raises:
            WeightsDiffer: the service has other weights; full ones come next.
        """
        self._apply(taken.changes)
        self._version = update.version
        self._checksum = taken.checksum
        if None not in {taken.checksum, update.checksum} and taken.checksum != update.checksum:
            self.forget()
            raise WeightsDiffer(
                f"Version {update.version} has checksum {update.checksum} at the service and {taken.checksum} here: "
                "its rollouts are of other weights. Push again; full weights are sent then."
            )

    def _apply(self, changes: dict[str, Changes]) -> None:
        dtypes = {entry.name: entry.dtype for entry in self._header.entries}
        for name, changed in changes.items():
            decode(name, bits(dtypes[name], self._tensors[name]), changed)
        changes.clear()

    def _read(self, entry: TensorEntry) -> Iterator[Data]:
        yield memoryview(self._tensors[entry.name])


def whole(blocks: Iterator[Data]) -> Data:
    """All `blocks` as one, without a copy where there is but one."""
    first = next(blocks, b"")
    rest = list(blocks)
    return b"".join([first, *rest]) if rest else first
