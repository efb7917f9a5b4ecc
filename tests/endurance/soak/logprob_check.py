"""Whether the log-probabilities of greedy rollouts are those of the weights that the rollouts name."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from benchmarks.reference_model import State
from rollout_client import AsyncRolloutClient
from rollout_client.contract.rollouts import SampleResult, Sampling
from tests.endurance.chaos.parts import TASK_NAME
from tests.endurance.soak.known_weights import KnownWeights

ROLLOUTS = 8
TURNS = 2
SAMPLING = Sampling(greedy=True, max_new_tokens=32, ignore_eos=True)
TOLERANCE = 0.02
"""Of the mean difference: what bfloat16 rounds differently in other batches."""


@dataclass(frozen=True, slots=True)
class LogprobDifferences:
    """Means over all generated tokens, as absolute values."""

    score: float
    """Between what the rollouts say and what `POST /score` says of the same tokens."""
    reference: float
    """Between what the rollouts say and what transformers computes with the weights that were pushed."""

    def problems(self, version: int) -> Iterator[str]:
        for name, difference in (("the score", self.score), ("transformers", self.reference)):
            if not difference <= TOLERANCE:
                yield f"version {version}: log-probabilities differ from those of {name} by {difference:.4f} on average"


async def logprob_differences(
    client: AsyncRolloutClient, weights: KnownWeights, version: int, state: State
) -> LogprobDifferences:
    """Plays rollouts by `version`, which is current and stays current meanwhile.

    Raises:
        RolloutError: the service refused, or a sequence could not be scored.
        ValueError: a rollout failed, or names another version.
    """
    samples = await client.example_samples(TASK_NAME, ROLLOUTS, seed=version)
    demand = {"version": version}
    played = await client.rollout(samples, sampling=SAMPLING, max_rollout_turns=TURNS, sample_retries=0, policy=demand)
    by_score, by_reference = [], []
    sequences = [ids_of(result) for result in played.samples]
    scored = (await client.score(sequences, policy=demand)).scores
    for result, ids, score in zip(played.samples, sequences, scored, strict=True):
        if score.logprobs is None or result.error is not None:
            raise ValueError(f"version {version}: {result.error or score.error}")
        said, places = generated(result, version)
        by_score.append(said - torch.tensor([score.logprobs[place] for place in places]))
        by_reference.append(said - weights.logprobs(state, ids)[torch.tensor(places) - 1])
    return LogprobDifferences(mean_size(by_score), mean_size(by_reference))


def ids_of(result: SampleResult) -> list[int]:
    return [token_id for message in result.message_log for token_id in message.token_ids]


def generated(result: SampleResult, version: int) -> tuple[torch.Tensor, list[int]]:
    """The log-probabilities of the generated tokens, and their places in the rollout.

    Raises:
        ValueError: one of them is not of `version`.
    """
    said: list[float] = []
    places: list[int] = []
    position = 0
    for message in result.message_log:
        if message.generation_logprobs is not None:
            if {int(span.version) for span in message.weight_versions or ()} != {version}:
                raise ValueError(f"version {version} was demanded, and {message.weight_versions} played")
            said += message.generation_logprobs
            places += range(position, position + len(message.token_ids))
        position += len(message.token_ids)
    return torch.tensor(said), places


def mean_size(differences: Sequence[torch.Tensor]) -> float:
    return float(torch.cat(list(differences)).abs().mean())
