"""256 games of several turns each under greedy decoding, whose right results are known from an undisturbed run."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any
from uuid import uuid4

from rollout_client import AsyncRolloutClient
from rollout_client.contract.rollouts import SampleInput, SampleResult, Sampling
from rollout_client.errors import RolloutError, StreamBroken

ROLLOUTS = 256
A_REQUEST = 64
POSTED_AGAIN_AFTER_S = 0.5
TURNS = 4
SAMPLING = Sampling(greedy=True, max_new_tokens=32)
SAMPLE_RETRIES = 16
"""A killed replica costs every rollout that it plays one, and those that follow may be tried before it is noticed."""


@dataclass(slots=True)
class Outcome:
    """What came of the rollouts of one run."""

    results: dict[int, SampleResult] = field(default_factory=dict)
    """By the number of the game."""
    twice: int = 0
    """Rollouts that came back once more."""
    posted_again: int = 0
    """Requests whose stream broke; they were posted again with their `Idempotency-Key`."""
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


OPTIONS: dict[str, Any] = {"sampling": SAMPLING, "max_rollout_turns": TURNS, "sample_retries": SAMPLE_RETRIES}


@dataclass
class Games:
    """One run of all games, in several requests that are streamed, each with an `Idempotency-Key`.

    Args:
        options: of the requests.
        broken: the errors after which a request is posted again.
        counts: what of a result must be the same each time that it is brought.
    """

    client: AsyncRolloutClient
    games: Sequence[SampleInput]
    options: Mapping[str, Any] = field(default_factory=lambda: OPTIONS)
    broken: type[RolloutError] = StreamBroken
    counts: Callable[[SampleResult], object] = what_counts
    outcome: Outcome = field(default_factory=Outcome)

    async def play(self) -> Outcome:
        """Returns when every game has come back, or its request has failed for good."""
        began = monotonic()
        numbers = range(len(self.games))
        requests = (numbers[begin : begin + A_REQUEST] for begin in numbers[::A_REQUEST])
        await asyncio.gather(*map(self._play_request, requests))
        self.outcome.seconds = monotonic() - began
        return self.outcome

    async def _play_request(self, numbers: Sequence[int]) -> None:
        key = uuid4().hex
        while True:
            try:
                await self._follow(numbers, key)
            except self.broken:
                self.outcome.posted_again += 1
                await asyncio.sleep(POSTED_AGAIN_AFTER_S)
                continue
            except RolloutError as error:
                self.outcome.errors.append(f"{type(error).__name__}: {error}")
            return

    async def _follow(self, numbers: Sequence[int], key: str) -> None:
        """Reads the rollouts of one request, all of them, also where an earlier stream of it has brought some."""
        brought: set[int] = set()
        samples = [self.games[number] for number in numbers]
        async with self.client.stream(samples, idempotency_key=key, **self.options) as rollouts:
            async for position, result in rollouts.with_positions():
                self._take(numbers[position], result, is_again=position in brought)
                brought.add(position)

    def _take(self, number: int, result: SampleResult, is_again: bool) -> None:
        self.outcome.twice += is_again
        earlier = self.outcome.results.setdefault(number, result)
        if self.counts(earlier) != self.counts(result):
            self.outcome.errors.append(f"game {number} had another result when its request was posted again")
