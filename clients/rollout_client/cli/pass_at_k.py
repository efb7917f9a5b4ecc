"""pass@k of groups of rollouts, by task, with a confidence interval. No I/O.

pass@k is the chance that one of k rollouts of a prompt passes. Its estimate for a prompt with n rollouts of which c
pass is 1 - C(n-c, k) / C(n, k), which has no bias (Chen et al. 2021, arXiv:2107.03374, equation 1). The estimate of a
task is the mean over its prompts.

The interval is Wilson's score interval for that mean over the prompts. A prompt's value lies between 0 and 1, so its
variance is at most that of a proportion with the same mean: the interval is never too narrow for its level, and it
keeps a width where every prompt passes or none does.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import comb, sqrt
from statistics import NormalDist

from rollout_client.contract.rollouts import SampleResult
from rollout_client.results.final_rewards import final_reward, finish_reasons

ALL_TASKS = "all"


@dataclass(slots=True)
class TaskCounts:
    """What is counted of a task."""

    prompts: list[tuple[int, int]] = field(default_factory=list)
    """Of each prompt: its rollouts with a final reward, and those of them that pass."""
    responses: int = 0
    clipped: int = 0
    """Responses that their length has cut."""

    def __add__(self, other: "TaskCounts") -> "TaskCounts":
        return TaskCounts(self.prompts + other.prompts, self.responses + other.responses, self.clipped + other.clipped)


@dataclass(frozen=True, slots=True)
class PassAtK:
    task_name: str
    k: int
    value: float | None
    """Mean over the prompts; `None` without one that can be counted."""
    low: float | None
    high: float | None
    """Ends of the interval."""
    prompts: int
    """Prompts that are counted: those with at least k rollouts that have a final reward."""
    left_out: int
    """Prompts with fewer: too many of their rollouts failed or were cut off."""
    clipped_ratio: float | None
    """Share of the task's responses that their length has cut; `None` without one."""


def pass_at_k(
    groups: Iterable[Sequence[SampleResult]], ks: Sequence[int], passes_at: float, confidence: float
) -> list[PassAtK]:
    """For each task, and for all together if there are several, each k.

    Args:
        groups: the rollouts of one prompt each.
        passes_at: a rollout passes with this reward or a higher one.
        confidence: the level of the interval, between 0 and 1.
    """
    by_task: dict[str, TaskCounts] = {}
    for group in groups:
        rewards = [reward for sample in group if (reward := final_reward(sample)) is not None]
        passed = sum(reward >= passes_at for reward in rewards)
        counts = by_task.setdefault(group[0].task_name, TaskCounts())
        counts.prompts.append((len(rewards), passed))
        reasons = [reason for sample in group for reason in finish_reasons(sample)]
        counts.responses += len(reasons)
        counts.clipped += reasons.count("length")
    if len(by_task) > 1:
        by_task[ALL_TASKS] = sum(by_task.values(), TaskCounts())
    return [of_task(task_name, k, counts, confidence) for task_name, counts in by_task.items() for k in ks]


def of_task(task_name: str, k: int, counts: TaskCounts, confidence: float) -> PassAtK:
    values = [estimate(total, passed, k) for total, passed in counts.prompts if total >= k]
    left_out = len(counts.prompts) - len(values)
    clipped_ratio = counts.clipped / counts.responses if counts.responses else None
    if not values:
        return PassAtK(task_name, k, None, None, None, 0, left_out, clipped_ratio)
    mean = sum(values) / len(values)
    low, high = wilson_interval(mean, len(values), confidence)
    return PassAtK(task_name, k, mean, low, high, len(values), left_out, clipped_ratio)


def estimate(total: int, passed: int, k: int) -> float:
    """The chance that k of `total` rollouts, drawn without putting back, hold one of the `passed`. `total` >= k."""
    return 1.0 - comb(total - passed, k) / comb(total, k)


def wilson_interval(mean: float, count: int, confidence: float) -> tuple[float, float]:
    """Wilson's score interval (1927) of a proportion `mean` of `count`."""
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    center = (mean + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * sqrt(mean * (1 - mean) / count + z * z / (4 * count * count))
    return max(0.0, center - half), min(1.0, center + half)
