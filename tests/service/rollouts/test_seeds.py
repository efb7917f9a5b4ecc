"""Seeds derived from other seeds."""

from hypothesis import given
from hypothesis import strategies as st

from deployments.protocols.generation import SamplingOptions, derived_seed
from service.rollouts.episode_records import sampling_of_turn


def test_a_derived_seed_is_the_same_in_every_process_and_release() -> None:
    assert derived_seed(7, 0) == 9211390842685670451
    assert derived_seed(7, 1, 2) == 7422271434609105906


@given(seed=st.integers(0, 2**63 - 1), path=st.lists(st.integers(0, 2**31)))
def test_a_derived_seed_fits_into_a_signed_64_bit_integer(seed: int, path: list[int]) -> None:
    assert 0 <= derived_seed(seed, *path) < 2**63


def test_different_places_get_different_seeds() -> None:
    places = [(), (0,), (1,), (0, 0), (0, 1), (1, 0), (10,), (1, 0, 0)]
    assert len({derived_seed(seed, *place) for seed in (7, 8) for place in places}) == 2 * len(places)


def test_each_turn_has_the_options_of_its_rollout_and_a_seed_of_its_own() -> None:
    options = SamplingOptions(temperature=0.5, top_k=3, seed=7)
    assert sampling_of_turn(options, 4) == SamplingOptions(temperature=0.5, top_k=3, seed=derived_seed(7, 4))
