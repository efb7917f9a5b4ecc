"""How far log-probabilities of the same tokens part: the one statistic of ledger and metrics. No I/O.

Between two log-probabilities of one token, the ratio of the probabilities is `exp(|difference|)`: 1 if they agree. A
mean counts no token as more than `MOST_COUNTED`, so that a few tokens decide nothing; how many are beyond it stands
beside the mean, and so does the largest ratio.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from math import exp, log
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Label = TypeVar("Label", bound=Hashable)
MOST_COUNTED = 10.0
"""A token whose ratio is beyond this counts as this in a mean."""
MOST_COUNTED_SIZE = log(MOST_COUNTED)
LARGEST_DIFFERENCE = 20.0
"""Differences beyond this count as this much: one token of probability 0 says as much as can be said."""


@dataclass(frozen=True, slots=True)
class Sums:
    """Sums over tokens. `|d|` is the size of the difference of a token's log-probabilities."""

    tokens: int = 0
    size: float = 0.0
    """Sum of `|d|`, of each token at most `MOST_COUNTED_SIZE`."""
    ratio: float = 0.0
    """Sum of the ratios, of each token at most `MOST_COUNTED`."""
    beyond: int = 0
    """Tokens whose ratio is beyond `MOST_COUNTED`."""
    largest: float = 0.0
    """The largest `|d|`."""

    @classmethod
    def of(cls, differences: ArrayLike) -> "Sums":
        """The sums of tokens with these differences. Where one is NaN, so are the means."""
        sizes = sizes_of(differences)
        if not len(sizes):
            return cls()
        counted = np.minimum(sizes, MOST_COUNTED_SIZE)
        beyond = int((sizes > MOST_COUNTED_SIZE).sum())
        return cls(len(sizes), float(counted.sum()), float(np.exp(counted).sum()), beyond, float(sizes.max()))

    def __add__(self, other: "Sums") -> "Sums":
        return Sums(
            self.tokens + other.tokens,
            self.size + other.size,
            self.ratio + other.ratio,
            self.beyond + other.beyond,
            max(self.largest, other.largest),
        )

    @property
    def mean_size(self) -> float:
        return self.size / self.tokens if self.tokens else 0.0

    @property
    def mean_ratio(self) -> float:
        return self.ratio / self.tokens if self.tokens else 1.0

    @property
    def share_beyond(self) -> float:
        return self.beyond / self.tokens if self.tokens else 0.0

    @property
    def largest_ratio(self) -> float:
        return exp(self.largest)


def total(parts: Iterable[Sums]) -> Sums:
    return sum(parts, Sums())


def totals_by(parts: Iterable[tuple[Label, Sums]]) -> dict[Label, Sums]:
    """The total of each label, in the order in which they come."""
    totals: dict[Label, Sums] = {}
    for label, sums in parts:
        totals[label] = totals.get(label, Sums()) + sums
    return totals


class TokenLabels(NamedTuple, Generic[Label]):
    """A label for each token: that of token `i` is `names[codes[i]]`. Bounded also where each token has its own."""

    names: Sequence[Label]
    codes: NDArray[np.intp]

    def within(self, start: int, end: int) -> "TokenLabels[Label]":
        return TokenLabels(self.names, self.codes[start:end])


def sums_by(labels: TokenLabels[Label], differences: Floats) -> dict[Label, Sums]:
    """The sums of each label that a token has, in the order of the names."""
    sizes = sizes_of(differences)
    counted = np.minimum(sizes, MOST_COUNTED_SIZE)
    largest = np.zeros(len(labels.names))
    np.maximum.at(largest, labels.codes, sizes)
    columns = [
        np.bincount(labels.codes, weights, len(labels.names)).tolist()
        for weights in (None, counted, np.exp(counted), sizes > MOST_COUNTED_SIZE)
    ]
    rows = zip(labels.names, *columns, largest.tolist(), strict=True)
    return {label: Sums(of[0], of[1], of[2], int(of[3]), of[4]) for label, *of in rows if of[0]}


def sizes_of(differences: ArrayLike) -> Floats:
    sizes: Floats = np.minimum(np.abs(np.asarray(differences, np.float64)), LARGEST_DIFFERENCE)
    return sizes
