"""Tensors of torch as a source of weights, sharded ones included; imports torch."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.distributed.tensor import DTensor

from rollout_client.policy_contract import PolicyLayout
from rollout_client.weights.safetensors_file import Data
from rollout_client.weights.sources import Tensor, fitted

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
"""What DDP, torch.compile, activation checkpointing and FSDP put into the names of what they wrap."""


@dataclass(frozen=True, slots=True)
class TorchTensor:
    """A tensor wherever it lies: on the CPU, on a GPU, or in shards over several."""

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

    def whole(self, dtype: str) -> torch.Tensor:
        """Cast where it lies, and shards before they travel: half the bytes for a master in 32 bits."""
        tensor = self.tensor.detach().to(DTYPES[dtype])
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def blocks(self, dtype: str) -> Iterator[Data]:
        yield data_of(self.whole(dtype))

    def is_tied_to(self, other: Tensor) -> bool:
        if not isinstance(other, TorchTensor):
            return False
        mine, others = local(self.tensor), local(other.tensor)
        if mine.data_ptr() == others.data_ptr() and mine.stride() == others.stride() and mine.numel():
            return True
        # A shard can be equal by chance (an empty one is), and then the processes would not agree.
        if isinstance(self.tensor, DTensor) or isinstance(other.tensor, DTensor):
            return False
        return mine.device == others.device and mine.dtype == others.dtype and torch.equal(mine, others)


def torch_tensors(source: nn.Module | Mapping[str, torch.Tensor]) -> dict[str, Tensor]:
    """The tensors of a module or of its state dict; what else a state dict holds is no weight."""
    state = source.state_dict() if isinstance(source, nn.Module) else source
    return {
        WRAPPERS.sub("", name): TorchTensor(tensor)
        for name, tensor in state.items()
        if isinstance(tensor, torch.Tensor)
    }


def gather(source: nn.Module | Mapping[str, torch.Tensor], layout: PolicyLayout) -> None:
    """What the other processes of a sharded model do while the first one pushes it: takes part in each gathering.

    Raises:
        WeightsDoNotFit: as it does where they are pushed.
    """
    for name, tensor in fitted(torch_tensors(source), layout).items():
        if isinstance(tensor, TorchTensor) and tensor.is_sharded:
            tensor.whole(layout.tensors[name].dtype)


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor


def data_of(tensor: torch.Tensor) -> memoryview:
    flat: NDArray[np.uint8] = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return flat.data


def cast(data: Data, from_dtype: str, to_dtype: str) -> memoryview:
    """`data` of one floating dtype as another."""
    values = torch.frombuffer(bytearray(data), dtype=DTYPES[from_dtype]) if len(data) else torch.empty(0)
    return data_of(values.to(DTYPES[to_dtype]))
