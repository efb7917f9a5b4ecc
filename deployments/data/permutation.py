"""A shuffle that needs no memory: the row at any place of a shuffled epoch is computed from its place alone.

Equal keys give equal shuffles in every process and with every version of the libraries. A list of the shuffled rows
would take 80 MB for ten million of them, and the time to make it, for each seed that a caller names.
"""

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

Places = npt.NDArray[np.uint64]
ROUNDS = 6


class Permutation:
    """A bijection of 0..size-1: a Feistel network over the next larger power of four.

    What falls outside is permuted again, until it falls inside.
    """

    def __init__(self, size: int, key: Sequence[int | str]) -> None:
        """Args: `key` chooses the permutation; `size` is at least 1."""
        self._size = np.uint64(size)
        half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
        self._shift, self._mask = np.uint64(half_bits), np.uint64(2**half_bits - 1)
        digest = blake2b(repr(tuple(key)).encode(), digest_size=8 * ROUNDS).digest()
        self._round_keys = np.frombuffer(digest, "<u8")

    def __call__(self, places: Places) -> Places:
        """Where each of these places, all below `size`, goes."""
        permuted = self._permuted(places)
        while (outside := permuted >= self._size).any():
            permuted[outside] = self._permuted(permuted[outside])
        return permuted

    def _permuted(self, places: Places) -> Places:
        left, right = places >> self._shift, places & self._mask
        for key in self._round_keys:
            left, right = right, left ^ (mixed(right + key) & self._mask)
        return (left << self._shift) | right


def mixed(values: Places) -> Places:
    """Each bit depends on all bits: the last part of splitmix64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
