"""Seeds that follow from other seeds, or from the id of a replica. No I/O; imports neither Ray nor vLLM."""

import hashlib

SEED_BITS = 32
"""vLLM seeds numpy with it, which takes no more. The seeds of 100 replicas are equal with a probability of 1e-6."""


def replica_seed(configured: int | None, replica_id: str) -> int:
    """A seed in [0, 2^32) for the replica `replica_id`, mixed with the `configured` one.

    Engines with equal seeds draw equal random numbers, so that unseeded requests on two replicas would get equal
    tokens. vLLM passes the seed of a replica to all its workers, which must agree on each token.
    """
    digest = hashlib.blake2b(repr((configured, replica_id)).encode(), digest_size=SEED_BITS // 8).digest()
    return int.from_bytes(digest)


def derived_seed(seed: int, *path: int) -> int:
    """A seed in [0, 2^63) for the place `path` under `seed`.

    The same place always gets the same seed; the seeds of different places are unrelated.
    """
    digest = hashlib.blake2b(repr((seed, *path)).encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1
