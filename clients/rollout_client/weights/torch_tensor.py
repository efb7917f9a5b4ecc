"""`TorchTensor`, a torch tensor as a source of weights, and its data as bytes. Needs the extra `torch`."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.tensor import DTensor

from rollout_client.weights.safetensors_file import Data
from rollout_client.weights.tensor import SourceTensor

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "F32": torch.float32,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class TorchTensor(SourceTensor):
    """A tensor on any device, whole or sharded over several processes."""

    tensor: torch.Tensor

    @property
    def dtype(self) -> str:
        return dtype_name(self.tensor)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def is_sharded(self) -> bool:
        return isinstance(self.tensor, DTensor) and self.tensor.device_mesh.size() > 1

    def gathered(self, dtype: str) -> torch.Tensor:
        """The whole tensor as `dtype`. Shards are cast before they are gathered: bf16 of f32 halves the traffic."""
        tensor = self.tensor.detach().to(DTYPES[dtype])
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def blocks(self, dtype: str) -> Iterator[Data]:
        yield data_of(self.gathered(dtype))

    def is_tied_to(self, other: SourceTensor) -> bool:
        if not isinstance(other, TorchTensor):
            return False
        mine, others = local_shard(self.tensor), local_shard(other.tensor)
        if mine.data_ptr() == others.data_ptr() and mine.stride() == others.stride() and mine.numel():
            return True
        # Shards may be equal on one process and not on another (an empty one always is): the processes would disagree.
        if isinstance(self.tensor, DTensor) or isinstance(other.tensor, DTensor):
            return False
        return mine.device == others.device and mine.dtype == others.dtype and torch.equal(mine, others)


def dtype_name(tensor: torch.Tensor) -> str:
    """What safetensors calls the dtype, or torch where safetensors has none."""
    return NAMES.get(tensor.dtype, str(tensor.dtype))


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor


def data_of(tensor: torch.Tensor) -> memoryview:
    """The data of `tensor` in host memory, as bytes."""
    flat: NDArray[np.uint8] = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return flat.data


def cast(data: Data, from_dtype: str, to_dtype: str) -> memoryview:
    """`data` of one floating dtype as another."""
    values = torch.frombuffer(bytearray(data), dtype=DTYPES[from_dtype]) if len(data) else torch.empty(0)
    return data_of(values.to(DTYPES[to_dtype]))
