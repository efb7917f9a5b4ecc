"""How rollouts ended, counted as they end."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rollout_client.contract.messages import FinishReason
from rollout_client.contract.rollouts import SampleResult, SampleStatus
from rollout_client.results import FINAL_STATUSES, finish_reasons


@dataclass(slots=True)
class Totals:
    tokens: int = 0
    """Generated tokens."""
    statuses: Counter[str] = field(default_factory=Counter)
    """Number of rollouts by status."""
    reward: float = 0.0
    """Sum of the final rewards."""
    rewarded: int = 0
    """Number of rollouts that have a final reward."""
    responses: int = 0
    clipped: int = 0
    """Number of responses that their length has cut."""

    @property
    def rollouts(self) -> int:
        return self.statuses.total()

    @property
    def error_rate(self) -> float:
        """Share of the rollouts that failed; 0 where there are none."""
        return self.statuses["error"] / self.rollouts if self.rollouts else 0.0

    @property
    def mean_reward(self) -> float | None:
        """Over the final rewards; `None` without one."""
        return self.reward / self.rewarded if self.rewarded else None

    @property
    def clipped_ratio(self) -> float | None:
        """Share of the responses that their length has cut; `None` without one."""
        return self.clipped / self.responses if self.responses else None

    def add(
        self, status: SampleStatus, total_reward: float | None, tokens: int, reasons: Sequence[FinishReason | None]
    ) -> None:
        """Adds one rollout; `reasons` has the `finish_reason` of each of its responses."""
        self.statuses[status] += 1
        self.tokens += tokens
        self.responses += len(reasons)
        self.clipped += reasons.count("length")
        if status in FINAL_STATUSES and total_reward is not None:
            self.reward += total_reward
            self.rewarded += 1

    def add_result(self, sample: SampleResult) -> None:
        self.add(sample.status, sample.total_reward, sample.metrics.assistant_tokens, finish_reasons(sample))

    def document(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "rollouts": self.rollouts,
            "statuses": dict(self.statuses),
            "error_rate": self.error_rate,
            "mean_reward": self.mean_reward,
            "clipped_ratio": self.clipped_ratio,
            "tokens": self.tokens,
        }
