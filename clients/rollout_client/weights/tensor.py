"""`SourceTensor`, one tensor of a source of weights, and `Weights`, the safetensors file that a push sends."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from rollout_client.weights.safetensors_file import Data, Header, TensorEntry, header_bytes


class SourceTensor(Protocol):
    """One tensor of a source; its data are read only when they are sent.

    `FileTensor` reads a safetensors file, `TorchTensor` a tensor in memory.
    """

    @property
    def dtype(self) -> str:
        """The name that safetensors has for it: `BF16`, `F32`, ..."""
        ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def is_sharded(self) -> bool:
        """Whether reading it is a collective operation of several processes."""
        ...

    def blocks(self, dtype: str) -> Iterator[Data]:
        """Its data, cast to `dtype`, little-endian, in blocks of any size."""
        ...

    def is_tied_to(self, other: "SourceTensor") -> bool:
        """Whether `other`, of the same shape, is the same tensor under another name."""
        ...


@dataclass(frozen=True, slots=True)
class Weights:
    """The content of a safetensors file, made while it is read: a header, and a function that reads each tensor."""

    header: Header
    read: Callable[[TensorEntry], Iterator[Data]]
    is_repeatable: bool = True
    """Whether the content can be read again. Sharded tensors cannot: every process would have to take part again."""
    checksum: str | None = None
    """The `Checksum` of its tensors where it is known already: then sending them does not compute it again."""

    def blocks(self) -> Iterator[Data]:
        """The bytes of the file in order, in blocks of any size."""
        yield header_bytes(self.header.entries, self.header.metadata)
        for entry in self.header.entries:
            yield from self.read(entry)
