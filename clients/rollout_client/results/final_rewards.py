"""How rollouts ended: which have a final reward, and which responses their length has cut.

Those have a final reward that ended, rather than failed or were cut off.
"""

from collections.abc import Sequence

from rollout_client.contract.rollouts import FinishReason, SampleResult, SampleStatus
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


def finish_reasons(sample: SampleResult) -> list[FinishReason | None]:
    """Of each response of the log; `None` for one whose generation was interrupted."""
    return [message.finish_reason for message in sample.message_log if message.generation_logprobs is not None]


def last_finish_reason(sample: SampleResult) -> FinishReason | None:
    """`None` without a response too."""
    return (finish_reasons(sample) or [None])[-1]


def is_clipped(sample: SampleResult) -> bool:
    """Whether its length has cut the last response, so that the policy did not end it. TRL's
    `mask_truncated_completions` takes such rollouts out of the loss, and verl's `clip_ratio` counts them."""
    return last_finish_reason(sample) == "length"


def reason_not_final(sample: SampleResult) -> str:
    reason = sample.status if sample.error is None else f"{sample.error.kind} error: {sample.error.message}"
    return f"idx {sample.idx} of task {sample.task_name}, generation {sample.generation_index}: {reason}"
