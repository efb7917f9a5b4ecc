"""Seeds that follow from other seeds. No I/O."""

import hashlib


def derived_seed(seed: int, *path: int) -> int:
    """A seed in [0, 2^63) for the place `path` under `seed`.

    The same place always gets the same seed; the seeds of different places are unrelated.
    """
    digest = hashlib.blake2b(repr((seed, *path)).encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1
