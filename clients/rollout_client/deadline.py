"""How long a call may take, and what that is for httpx."""

import time
from dataclasses import dataclass, field

import httpx

from rollout_client.errors import RolloutTimeout

CONNECT_TIMEOUT_S = 5.0
"""Reaching a host takes milliseconds; only the rollout itself is long."""

SHORT_CALL_TIMEOUT_S = 60.0
"""For calls that play no rollouts and change no weights: longer than a proxy takes to come back."""

SHORT_CALL_ADVICE = "allow more with timeout_s."
ROLLOUT_ADVICE = "what was still running is cancelled. Allow more with timeout_s, or ask for fewer or shorter rollouts."
UPDATE_ADVICE = "the update may still go on: ask client.policy(). Allow more with timeout_s."


@dataclass(frozen=True, slots=True)
class Deadline:
    """Lies `timeout_s` seconds after it was made; `None` sets no limit."""

    timeout_s: float | None
    started_at: float = field(default_factory=time.monotonic)
    advice: str = ROLLOUT_ADVICE
    """The end of the sentence of `error`."""

    def left_s(self) -> float | None:
        """Seconds until the deadline. Raises `RolloutTimeout` after it."""
        if self.timeout_s is None:
            return None
        left_s = self.started_at + self.timeout_s - time.monotonic()
        if left_s <= 0:
            raise self.error()
        return left_s

    def http_timeout(self) -> httpx.Timeout:
        """For one attempt. Raises `RolloutTimeout` after the deadline."""
        left_s = self.left_s()
        return httpx.Timeout(left_s, connect=min(CONNECT_TIMEOUT_S, left_s or CONNECT_TIMEOUT_S), pool=None)

    def error(self) -> RolloutTimeout:
        return RolloutTimeout(
            f"The response was not complete after {time.monotonic() - self.started_at:.3g} s; {self.advice}"
        )
