"""How rollouts ended, counted as they end."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from rollout_client.contract.rollouts import SampleResult
from rollout_client.results import final_reward, finish_reasons


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

    def add(self, sample: SampleResult) -> None:
        reasons = finish_reasons(sample)
        self.statuses[sample.status] += 1
        self.tokens += sample.metrics.assistant_tokens
        self.responses += len(reasons)
        self.clipped += reasons.count("length")
        if (reward := final_reward(sample)) is not None:
            self.reward += reward
            self.rewarded += 1

    def document(self) -> dict[str, Any]:
        """For `--json`."""
        names = ("rollouts", "error_rate", "mean_reward", "clipped_ratio", "tokens")
        return {"statuses": dict(self.statuses), **{name: getattr(self, name) for name in names}}


def totals_of(samples: Iterable[SampleResult]) -> Totals:
    totals = Totals()
    for sample in samples:
        totals.add(sample)
    return totals
