"""Rows of tokens as padded tensors. Needs torch."""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from rollout_client.tensors.rollouts import Integers

PaddingSide = Literal["right", "left"]


@dataclass(frozen=True, slots=True)
class Padding:
    token_id: int
    side: PaddingSide
    to_multiple_of: int

    def mask(self, lengths: Integers) -> NDArray[np.bool_]:
        """[B, T]: True for a token, False for padding."""
        longest = int(lengths.max(initial=0))
        places = np.arange(-(-longest // self.to_multiple_of) * self.to_multiple_of)
        from_start = places if self.side == "right" else places[::-1]
        return from_start < lengths[:, None]


def padded(flat: NDArray[Any], mask: NDArray[np.bool_], fill: int, dtype: DTypeLike) -> Tensor:
    """[B, T]: the values of `flat` where `mask` is True, row by row; `fill` elsewhere."""
    # np.zeros takes pages that the system has zeroed, np.full writes them: this halves the time of a large tensor.
    values = np.full(mask.shape, fill, dtype) if fill else np.zeros(mask.shape, dtype)
    values[mask] = flat
    return torch.from_numpy(values)
