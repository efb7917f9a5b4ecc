"""Compares the log-probabilities of a session with those of `POST /score` for the same tokens."""

from collections.abc import Sequence

from rollout_client import AsyncRolloutClient
from rollout_client.contract.sessions import SessionSample
from tests.endurance.session_laws.laws import responses_of


async def differences_to_score(client: AsyncRolloutClient, samples: Sequence[SessionSample]) -> list[float]:
    """Absolute differences, by token, of all branches. They must have been sampled with temperature 1."""
    if not samples:
        return []
    logs = [[token_id for message in sample.message_log for token_id in message.token_ids] for sample in samples]
    found: list[float] = []
    for sample, score in zip(samples, (await client.score(logs)).scores, strict=True):
        if score.logprobs is None:
            raise ValueError(f"A branch was not scored: {score.error}")
        for _, _, prompt, message in responses_of(sample):
            scored = score.logprobs[len(prompt) : len(prompt) + len(message.token_ids)]
            pairs = zip(message.generation_logprobs or (), scored, strict=True)
            found += [float("inf") if other is None else abs(one - other) for one, other in pairs]
    return found
