"""Seeds of a repeatable request: each sample, rollout and turn samples with a seed derived from the one above it."""

from dataclasses import replace

from deployments.protocols.generation import SamplingOptions
from deployments.seeds import derived_seed


def sampling_of_turn(sampling: SamplingOptions, turn: int, tokens: int = 0) -> SamplingOptions:
    """The rollout's sampling options with the seed of one turn, numbered from 0.

    A generation that goes on after `tokens` tokens of the turn has a seed of its own: with that of the turn it would
    draw again what was drawn for the first tokens.
    """
    if sampling.seed is None:
        return sampling
    return replace(sampling, seed=derived_seed(sampling.seed, turn, *((tokens,) if tokens else ())))
