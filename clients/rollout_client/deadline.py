"""How long an answer may take, and how that is said to httpx."""

import time
from dataclasses import dataclass, field

import httpx

from rollout_client.errors import RolloutTimeout

CONNECT_TIMEOUT_S = 5.0
"""Reaching a host takes milliseconds; only the rollout itself is long."""

SHORT_CALL_TIMEOUT_S = 30.0
"""For calls that play no rollout."""

ROLLOUT_ADVICE = "what was still running is cancelled. Allow more with timeout_s, or ask for fewer or shorter rollouts."
UPDATE_ADVICE = "the update may still go on: ask client.policy(). Allow more with timeout_s."


@dataclass(frozen=True, slots=True)
class Deadline:
    """`timeout_s` seconds from its making, or never."""

    timeout_s: float | None
    started_at: float = field(default_factory=time.monotonic)
    advice: str = ROLLOUT_ADVICE
    """What the error says after how long it took."""

    def left_s(self) -> float | None:
        """Raises `RolloutTimeout` when nothing is left."""
        if self.timeout_s is None:
            return None
        left_s = self.started_at + self.timeout_s - time.monotonic()
        if left_s <= 0:
            raise self.error()
        return left_s

    def http_timeout(self) -> httpx.Timeout:
        """Raises `RolloutTimeout` when nothing is left."""
        left_s = self.left_s()
        return httpx.Timeout(left_s, connect=min(CONNECT_TIMEOUT_S, left_s or CONNECT_TIMEOUT_S), pool=None)

    def error(self) -> RolloutTimeout:
        return RolloutTimeout(
            f"The answer was not complete after {time.monotonic() - self.started_at:.3g} s; {self.advice}"
        )
