"""Which rollouts have a final reward: those that ended, rather than failed or were cut off."""

from collections.abc import Sequence

from rollout_client.contract import SampleResult, SampleStatus
from rollout_client.errors import RolloutError

FINAL_STATUSES: frozenset[SampleStatus] = frozenset({"completed", "truncated", "max_turns"})


class RolloutsNotFinal(RolloutError):
    """Some rollouts have no final reward, and the caller asked for all of them.

    Args:
        samples: the rollouts without a final reward; at least one.
        total: the number of rollouts that were played, these included.
    """

    def __init__(self, samples: Sequence[SampleResult], total: int) -> None:
        super().__init__(f"{len(samples)} of {total} rollouts have no final reward; {reason_not_final(samples[0])}")
        self.samples = samples


def final_reward(sample: SampleResult) -> float | None:
    """`total_reward` where it is final; `None` for a rollout that failed, or ended by a deadline or a cancellation."""
    return sample.total_reward if sample.status in FINAL_STATUSES else None


def reason_not_final(sample: SampleResult) -> str:
    reason = sample.status if sample.error is None else f"{sample.error.kind} error: {sample.error.message}"
    return f"idx {sample.idx} of task {sample.task_name}, generation {sample.generation_index}: {reason}"
