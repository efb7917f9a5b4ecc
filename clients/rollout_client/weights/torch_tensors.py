"""`TorchTensor`: torch tensors as a source of weights, sharded ones included. Needs the extra `torch`."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.distributed.tensor import DTensor

from rollout_client.policy_contract import PolicyLayout
from rollout_client.weights.layout import fitted
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
WRAPPERS = re.compile(r"(^module\.)|((^|(?<=\.))(_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.)")
"""What DDP, torch.compile, activation checkpointing and FSDP add to the names of the modules that they wrap."""


@dataclass(frozen=True, slots=True)
class TorchTensor(SourceTensor):
    """A tensor on any device, whole or sharded over several processes."""

    tensor: torch.Tensor

    @property
    def dtype(self) -> str:
        return NAMES.get(self.tensor.dtype, str(self.tensor.dtype))

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


def torch_tensors(source: nn.Module | Mapping[str, torch.Tensor]) -> dict[str, SourceTensor]:
    """The tensors of a module or of a state dict, under their names without wrappers; other values are ignored."""
    state = source.state_dict() if isinstance(source, nn.Module) else source
    return {
        WRAPPERS.sub("", name): TorchTensor(tensor)
        for name, tensor in state.items()
        if isinstance(tensor, torch.Tensor)
    }


def gather(source: nn.Module | Mapping[str, torch.Tensor], layout: PolicyLayout) -> None:
    """Takes part in gathering a sharded model. Every process calls it, except the one that pushes, at the same time.

    Raises:
        WeightsDoNotFit: the weights do not fit; the process that pushes raises it too.
    """
    for name, tensor in fitted(torch_tensors(source), layout).items():
        if isinstance(tensor, TorchTensor) and tensor.is_sharded:
            tensor.gathered(layout.tensors[name].dtype)


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
