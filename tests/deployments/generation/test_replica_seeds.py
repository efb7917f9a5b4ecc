"""The seeds of engines: no two replicas share one."""

import pytest

from deployments.generation.generator_replica import _SEED_BITS, _replica_seed


@pytest.mark.parametrize(
    ("configured", "replica_id", "seed"),
    [(None, "a", 111606993), (0, "a", 120256410), (7, "a", 2679081301), (7, "b", 3374731680)],
)
def test_the_seed_follows_from_the_configured_one_and_the_replicas_id(
    configured: int | None, replica_id: str, seed: int
) -> None:
    assert _replica_seed(configured, replica_id) == seed


def test_a_thousand_replicas_have_different_seeds_that_numpy_takes() -> None:
    seeds = [_replica_seed(None, f"replica-{number}") for number in range(1000)]
    assert len(set(seeds)) == 1000
    assert 2 ** (_SEED_BITS - 1) < max(seeds) < 2**_SEED_BITS
