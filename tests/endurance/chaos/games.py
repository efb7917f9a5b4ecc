"""256 games of several turns each under greedy decoding, whose right results are known from an undisturbed run."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic
from uuid import uuid4

from rollout_client import AsyncRolloutClient
from rollout_client.contract.rollouts import SampleInput, SampleResult, Sampling
from rollout_client.errors import RolloutError, StreamBroken
from tests.endurance.chaos.parts import TASK_NAME

ROLLOUTS = 256
ROLLOUTS_A_REQUEST = 64
TURNS = 4
SAMPLING = Sampling(greedy=True, max_new_tokens=32)
SAMPLE_RETRIES = 16
"""A killed replica costs every rollout that it plays one, and those that follow may be tried before it is noticed."""
SEED = 11


@dataclass(slots=True)
class Outcome:
    """What came of the rollouts of one run."""

    results: dict[int, SampleResult] = field(default_factory=dict)
    """By the number of the game."""
    twice: int = 0
    """Rollouts that came back once more."""
    errors: list[str] = field(default_factory=list)
    """Requests that ended otherwise."""
    seconds: float = 0.0

    def lost(self) -> int:
        """Rollouts that did not come back, or came back failed."""
        return ROLLOUTS - sum(result.status != "error" for result in self.results.values())

    def changed_from(self, undisturbed: "Outcome") -> int:
        """Rollouts that came back with another result than in the undisturbed run."""
        whole = {number: result for number, result in self.results.items() if result.status != "error"}
        return sum(what_counts(result) != what_counts(undisturbed.results[number]) for number, result in whole.items())


def what_counts(result: SampleResult) -> tuple[object, ...]:
    """What greedy decoding determines. Log-probabilities depend in their last digits on what else is in the batch."""
    tokens = [(message.role, message.content, message.token_ids) for message in result.message_log]
    return tokens, result.status, result.total_reward, result.metrics.turn_count, result.extra_env_info


async def example_games(client: AsyncRolloutClient) -> list[SampleInput]:
    return await client.example_samples(TASK_NAME, ROLLOUTS, seed=SEED)


class Games:
    """One run of all games, in several requests that are streamed, each with an `Idempotency-Key`."""

    def __init__(self, client: AsyncRolloutClient, games: Sequence[SampleInput]) -> None:
        self.outcome = Outcome()
        self._client = client
        self._games = games

    async def play(self) -> Outcome:
        """Returns when every game has come back, or its request has failed for good."""
        began = monotonic()
        numbers = range(len(self._games))
        requests = (numbers[begin : begin + ROLLOUTS_A_REQUEST] for begin in numbers[::ROLLOUTS_A_REQUEST])
        await asyncio.gather(*map(self._play_request, requests))
        self.outcome.seconds = monotonic() - began
        return self.outcome

    async def _play_request(self, numbers: Sequence[int]) -> None:
        key = uuid4().hex
        while True:
            try:
                await self._follow(numbers, key)
            except StreamBroken:
                continue
            except RolloutError as error:
                self.outcome.errors.append(f"{type(error).__name__}: {error}")
            return

    async def _follow(self, numbers: Sequence[int], key: str) -> None:
        """Reads the rollouts of one request, all of them, also where an earlier stream of it has brought some."""
        brought: set[int] = set()
        async with self._client.stream(
            [self._games[number] for number in numbers],
            sampling=SAMPLING,
            max_rollout_turns=TURNS,
            sample_retries=SAMPLE_RETRIES,
            idempotency_key=key,
        ) as rollouts:
            async for position, result in rollouts.with_positions():
                self._take(numbers[position], result, is_again=position in brought)
                brought.add(position)

    def _take(self, number: int, result: SampleResult, is_again: bool) -> None:
        self.outcome.twice += is_again
        earlier = self.outcome.results.setdefault(number, result)
        if what_counts(earlier) != what_counts(result):
            self.outcome.errors.append(f"game {number} had another result when its request was posted again")
