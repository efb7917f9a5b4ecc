"""Compares the log-probabilities of a session with those of `POST /score` and `POST /rollout` for the same tokens."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from rollout_client import AsyncRolloutClient, Sampling
from rollout_client.contract.sessions import SessionSample
from tests.endurance.session_laws.laws import responses_of
from tests.endurance.session_laws.random_agent import Call, Choice

TASK_NAME = "math"


@dataclass(slots=True)
class Differences:
    """Absolute differences of log-probabilities, by token."""

    scored: list[float] = field(default_factory=list)
    """To `POST /score`."""
    played: list[float] = field(default_factory=list)
    """To `POST /rollout`."""
    other_tokens: int = 0
    """Greedy responses of which a rollout has other tokens: where two are about as likely, rounding decides."""


async def add_scored(client: AsyncRolloutClient, samples: Sequence[SessionSample], found: Differences) -> None:
    """Scores all branches. They must have been sampled with temperature 1."""
    if not samples:
        return
    logs = [[token_id for message in sample.message_log for token_id in message.token_ids] for sample in samples]
    scores = (await client.score(logs)).scores
    for sample, score in zip(samples, scores, strict=True):
        if score.logprobs is None:
            raise ValueError(f"A branch was not scored: {score.error}")
        for _, _, prompt, message in responses_of(sample):
            scored = score.logprobs[len(prompt) : len(prompt) + len(message.token_ids)]
            found.scored += differences(message.generation_logprobs or (), scored)


async def add_played(client: AsyncRolloutClient, calls: Sequence[Call], found: Differences) -> None:
    """Plays the prompts of greedy calls as rollouts of one turn."""
    by_length: dict[int, list[tuple[Call, Choice]]] = defaultdict(list)
    for call in calls:
        for choice in call.choices[:1]:
            if choice.logprobs is not None:
                by_length[len(choice.token_ids)].append((call, choice))
    for length, asked in by_length.items():
        posted = [
            {
                "task_name": TASK_NAME,
                "message_log": [{"role": "user", "content": "", "token_ids": call.prompt}],
                "extra_env_info": {"ground_truth": "0"},
            }
            for call, _ in asked
        ]
        sampling = Sampling(greedy=True, max_new_tokens=length)
        played = await client.rollout(posted, sampling=sampling, max_rollout_turns=1)
        for (_, choice), rollout in zip(asked, played.samples, strict=True):
            response = rollout.message_log[1]
            if list(response.token_ids) != choice.token_ids:
                found.other_tokens += 1
            else:
                found.played += differences(choice.logprobs or (), response.generation_logprobs or ())


def differences(first: Sequence[float], second: Sequence[float | None]) -> list[float]:
    return [abs(one - other) if other is not None else float("inf") for one, other in zip(first, second, strict=True)]
