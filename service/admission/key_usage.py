"""Usage of the quotas of each key in one ingress replica.

Guarantees: the rollouts in flight of a key never exceed the share of `max_rollouts` that an ingress replica has, not
even for a single request, so those on all replicas never exceed the quota; a generation starts only while the key has
tokens left; each token of a rollout is counted once; its runs with a sandbox never exceed the replica's share of
`max_sandboxes`, and begin in the order in which they asked. Over any time t the tokens charged to a `TokenBudget`
exceed `per_minute * (1 + t / 60 s)` by no more than the last charge: it is never negative when a charge is permitted.
"""

import asyncio
import math
from collections.abc import Callable, Sequence

from anyio import CapacityLimiter

from deployments.protocols.generation import Generation, GenerationRequest, Generator, ScoringRequest
from deployments.protocols.replicas import GeneratorDescription
from service.access.keys import KeyQuotas
from service.admission.capacity import Bound, Capacity

SECONDS_PER_MINUTE = 60.0


class TokenBudget:
    """A token bucket that holds at most a minute's worth."""

    def __init__(self, per_minute: int, now: float) -> None:
        """Full at first; `per_minute` is at least 1."""
        self._per_minute = per_minute
        self._tokens = float(per_minute)
        self._at = now

    def wait_s(self, now: float) -> float:
        """Seconds until something may be charged; 0 if it may be now."""
        self._advance(now)
        return 0.0 if self._tokens > 0 else (1 - self._tokens) / self._per_second

    def charge(self, tokens: float, now: float) -> None:
        """Takes `tokens`, possibly into debt; a negative amount is a refund."""
        self._advance(now)
        self._tokens = min(self._tokens - tokens, self._per_minute)

    def change(self, per_minute: int, now: float) -> None:
        """Changes the rate. Debt remains."""
        self._advance(now)
        self._per_minute = per_minute
        self._tokens = min(self._tokens, per_minute)

    @property
    def _per_second(self) -> float:
        return self._per_minute / SECONDS_PER_MINUTE

    def _advance(self, now: float) -> None:
        self._tokens = min(self._tokens + (now - self._at) * self._per_second, self._per_minute)
        self._at = now


FIRST_EXPECTED_TOKENS = 256.0
"""Length of a key's generations, until the first ones have ended."""
LEARNING_RATE = 1 / 16
LONGEST_NAP_S = 1.0
"""Quota re-check interval: tokens may be refunded, or the quota raised."""


class KeyUsage:
    """Usage by all requests whose keys have one name."""

    def __init__(
        self,
        name: str,
        ingress_replicas: Callable[[], int],
        now_s: Callable[[], float],
        bounds: Sequence[Bound],
    ) -> None:
        self.capacity = Capacity()
        self.sandboxes = CapacityLimiter(math.inf)
        """To be held by a task while it has a sandbox, also without a quota: one may be set meanwhile."""
        self._bounds = bounds
        self._name = name
        self._ingress_replicas = ingress_replicas
        self._now_s = now_s
        self._budget: TokenBudget | None = None
        self._next_in_turn = asyncio.Lock()
        self._mean_tokens = FIRST_EXPECTED_TOKENS

    def set_quotas(self, quotas: KeyQuotas) -> None:
        """Applies the quotas that the keys file has now."""
        replicas = self._ingress_replicas()
        bounds = [*self._bounds]
        if quotas.max_rollouts is not None:
            bounds.append(_rollouts_bound(self._name, quotas.max_rollouts, replicas))
        self.capacity.bounds = bounds
        most = quotas.max_sandboxes
        self.sandboxes.total_tokens = math.inf if most is None else _share_of_quota(most, replicas)
        if quotas.tokens_per_minute is None:
            self._budget = None
            return
        share = _share_of_quota(quotas.tokens_per_minute, replicas)
        if self._budget is None:
            self._budget = TokenBudget(share, self._now_s())
        else:
            self._budget.change(share, self._now_s())

    @property
    def has_token_quota(self) -> bool:
        return self._budget is not None

    def wait_s(self) -> float:
        """Seconds until the key has tokens; 0 if it has some."""
        return 0.0 if self._budget is None else self._budget.wait_s(self._now_s())

    def expected_tokens(self, max_new_tokens: int) -> float:
        return min(self._mean_tokens, max_new_tokens)

    async def take(self, tokens: float) -> None:
        """Waits behind earlier generations of the key, and until the key has tokens; then charges `tokens`."""
        async with self._next_in_turn:
            while (wait_s := self.wait_s()) > 0:
                await asyncio.sleep(min(wait_s, LONGEST_NAP_S))
            self.charge(tokens)

    def charge(self, tokens: float) -> None:
        if self._budget is not None:
            self._budget.charge(tokens, self._now_s())

    def learn(self, new_tokens: float) -> None:
        self._mean_tokens += LEARNING_RATE * (new_tokens - self._mean_tokens)


def _share_of_quota(quota: int, ingress_replicas: int) -> int:
    """The share of each ingress replica. All shares together are at most the quota, or 1 each where it is less."""
    return max(quota // ingress_replicas, 1)


def _rollouts_bound(name: str, quota: int, ingress_replicas: int) -> Bound:
    setting = f"max_rollouts of the key {name}"
    if ingress_replicas > 1:
        setting += f" ({quota}, shared by {ingress_replicas} ingress replicas)"
    return Bound("rollouts", _share_of_quota(quota, ingress_replicas), setting)


class MeteredGenerator(Generator):
    """Charges the tokens of one request's rollouts to the quota of its key; generations wait while it is used up.

    A generation is charged its expected length when it starts and its true length when it ends. One that fails gets its
    charge back; one that is cancelled keeps it, because the engine has worked for it.
    """

    def __init__(self, generator: Generator, usage: KeyUsage) -> None:
        self._generator = generator
        self._usage = usage
        self._counted: dict[str, int] = {}
        """Tokens that were charged, by rollout."""

    async def generate(self, request: GenerationRequest) -> Generation:
        usage, prompt_tokens = self._usage, len(request.prompt_token_ids)
        added = max(prompt_tokens - self._counted.get(request.rollout_id, 0), 0)
        expected = added + usage.expected_tokens(request.max_new_tokens)
        await usage.take(expected)
        try:
            generation = await self._generator.generate(request)
        except Exception:
            usage.charge(-expected)
            raise
        new_tokens = len(generation.token_ids)
        usage.charge(added + new_tokens - expected)
        if generation.finish_reason != "abort" and not isinstance(request, ScoringRequest):
            usage.learn(new_tokens)
        self._counted[request.rollout_id] = prompt_tokens + new_tokens
        return generation

    def is_generating(self, rollout_id: str) -> bool:
        return self._generator.is_generating(rollout_id)

    def interrupt(self, rollout_id: str) -> bool:
        return self._generator.interrupt(rollout_id)

    def release(self, rollout_id: str) -> None:
        self._counted.pop(rollout_id, None)
        self._generator.release(rollout_id)

    async def describe(self) -> GeneratorDescription:
        return await self._generator.describe()
