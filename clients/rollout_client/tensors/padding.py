"""Rows of tokens as padded tensors. Needs torch."""

from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

PaddingSide = Literal["right", "left"]


def token_mask(lengths: NDArray[np.int64], side: PaddingSide, to_multiple_of: int) -> NDArray[np.bool_]:
    """[B, T]: True for a token, False for padding."""
    longest = int(lengths.max(initial=0))
    places = np.arange(-(-longest // to_multiple_of) * to_multiple_of)
    from_start = places if side == "right" else places[::-1]
    return from_start < lengths[:, None]


def padded(flat: NDArray[Any], mask: NDArray[np.bool_], fill: int, dtype: DTypeLike) -> Tensor:
    """[B, T, ...]: the values of `flat` [N, ...] where `mask` [B, T] is True, row by row; `fill` elsewhere."""
    shape = *mask.shape, *flat.shape[1:]
    # np.zeros takes pages that the system has zeroed, np.full writes them: this halves the time of a large tensor.
    values = np.full(shape, fill, dtype) if fill else np.zeros(shape, dtype)
    values[mask] = flat
    return torch.from_numpy(values)
