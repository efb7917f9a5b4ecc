"""Seeds of a repeatable request: each sample, rollout and turn samples with a seed derived from the one above it."""

import hashlib
from dataclasses import replace

from deployments.protocols import SamplingOptions


def derived_seed(seed: int, *path: int) -> int:
    """A seed in [0, 2^63) for the place `path` under `seed`.

    The same place always gets the same seed; the seeds of different places are unrelated.
    """
    digest = hashlib.blake2b(repr((seed, *path)).encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


def sampling_of_turn(sampling: SamplingOptions, turn: int, tokens: int = 0) -> SamplingOptions:
    """The rollout's sampling options with the seed of one turn, numbered from 0.

    A generation that goes on after `tokens` tokens of the turn has a seed of its own: with that of the turn it would
    draw again what was drawn for the first tokens.
    """
    if sampling.seed is None:
        return sampling
    return replace(sampling, seed=derived_seed(sampling.seed, turn, *((tokens,) if tokens else ())))
