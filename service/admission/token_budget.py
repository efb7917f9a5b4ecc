"""How fast one party may use tokens. A state machine without I/O: the caller passes the time in.

Guarantee: over any time t the charged tokens exceed `per_minute * (1 + t / 60 s)` by no more than the last charge: the
budget is never negative when a charge is permitted.
"""

SECONDS_PER_MINUTE = 60.0


class TokenBudget:
    """Saves up at most what a minute brings, and is full at the start."""

    def __init__(self, per_minute: int, now: float) -> None:
        """Args: `per_minute` >= 1."""
        self._per_minute = per_minute
        self._tokens = float(per_minute)
        self._at = now

    def wait_s(self, now: float) -> float:
        """Seconds until something may be charged; 0 if it may be now."""
        self._advance(now)
        return 0.0 if self._tokens > 0 else (1 - self._tokens) / self._per_second

    def charge(self, tokens: float, now: float) -> None:
        """Takes `tokens`, perhaps more than there are; gives them back if they are negative."""
        self._advance(now)
        self._tokens = min(self._tokens - tokens, self._per_minute)

    def change(self, per_minute: int, now: float) -> None:
        """What is owed stays owed."""
        self._advance(now)
        self._per_minute = per_minute
        self._tokens = min(self._tokens, per_minute)

    @property
    def _per_second(self) -> float:
        return self._per_minute / SECONDS_PER_MINUTE

    def _advance(self, now: float) -> None:
        self._tokens = min(self._tokens + (now - self._at) * self._per_second, self._per_minute)
        self._at = now
