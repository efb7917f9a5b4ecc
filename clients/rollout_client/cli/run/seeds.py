"""Seeds by row, so that a run gives the same rollouts however it is cut into requests."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from rollout_client.calls.rollouts import RolloutOptions


def with_seeds(samples: Sequence[Mapping[str, Any]], options: RolloutOptions) -> list[dict[str, Any]]:
    """Each sample with its `idx`, by default its row, and a seed of its own if the sampling has one."""
    sampling = options.get("sampling")
    seed = sampling.get("seed") if isinstance(sampling, Mapping) else None
    numbered = [{"idx": row, **sample} for row, sample in enumerate(samples)]
    if seed is None:
        return numbered
    return [{"seed": row_seed(seed, row), **sample} for row, sample in enumerate(numbered)]


def row_seed(seed: int, row: int) -> int:
    """In [0, 2^63), and unrelated to those of other rows."""
    digest = hashlib.blake2b(f"{seed}/{row}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1
