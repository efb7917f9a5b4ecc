"""The metrics of a request, by the names that NeMo-RL's rollout module gave them."""

from collections.abc import Sequence
from statistics import fmean, median, stdev

import numpy as np

from rollout_client.contract import PolicyVersions, RequestMetrics, SampleMetrics, SampleResult

PLAYED_TO_THEIR_END = ("completed", "truncated", "max_turns")
FIELDS = {
    "turns_per_sample": "turn_count",
    "total_tokens_per_sample": "total_tokens",
    "gen_tokens_per_sample": "assistant_tokens",
    "env_tokens_per_sample": "env_tokens",
    "total_reward": "total_reward",
}


class RequestMetricsAccumulator:
    """Takes the results of a request one by one, as they finish, and sums them up at its end.

    Failed samples are in no average, nor are those that a deadline or `keep` cut off: their rewards are not final.
    """

    def __init__(self) -> None:
        self._samples: list[SampleMetrics] = []
        self._versions: set[str] = set()

    def add(self, result: SampleResult) -> None:
        if result.status in PLAYED_TO_THEIR_END:
            self._samples.append(result.metrics)
        self._versions.update(span.version for message in result.message_log for span in message.weight_versions or ())

    def metrics(self) -> RequestMetrics:
        """Lengths in tokens, without the prompts' own; rates are shares in [0, 1]; empty if no sample counts."""
        samples = self._samples
        if not samples:
            return {}
        return {**averages(samples), **turn_metrics(samples), **spread_by_field(samples)}

    def policy(self, current: int | None = None) -> PolicyVersions:
        """The oldest and newest weights among all tokens, beside those that are current; numbers upward, as text."""
        said = None if current is None else str(current)
        if not self._versions:
            return PolicyVersions(oldest=None, newest=None, current=said)
        versions = sorted(self._versions, key=int)
        return PolicyVersions(oldest=versions[0], newest=versions[-1], current=said)


def averages(samples: Sequence[SampleMetrics]) -> RequestMetrics:
    turns = [sample.turn_count for sample in samples]
    rewards = [sample.total_reward for sample in samples if sample.total_reward is not None]
    return {
        "total_turns": sum(turns),
        "avg_turns_per_sample": fmean(turns),
        "max_turns_per_sample": max(turns),
        "natural_termination_rate": fmean(sample.terminated for sample in samples),
        "truncation_rate": fmean(sample.truncated for sample in samples),
        "max_turns_reached_rate": fmean(sample.max_turns_reached for sample in samples),
        "mean_total_tokens_per_sample": fmean(sample.total_tokens for sample in samples),
        "mean_gen_tokens_per_sample": fmean(sample.assistant_tokens for sample in samples),
        "mean_env_tokens_per_sample": fmean(sample.env_tokens for sample in samples),
        "mean_total_reward": fmean(rewards),
        "max_total_reward": max(rewards),
        "min_total_reward": min(rewards),
    }


def turn_metrics(samples: Sequence[SampleMetrics]) -> RequestMetrics:
    """Over single generations, and over the longest generation of each sample; percentiles interpolate linearly."""
    generations = [length for sample in samples for length in sample.turn_gen_tokens]
    inputs = [length for sample in samples for length in sample.turn_input_tokens]
    longest = [max(sample.turn_gen_tokens, default=0) for sample in samples]
    turns = [sample.turn_count for sample in samples]
    # In one go: most of what a small request's metrics cost are NumPy's preparations for any percentile at all.
    (turns_p95, longest_p95), (turns_p99, _) = np.percentile([turns, longest], [95, 99], axis=1).tolist()
    return {
        "mean_generation_length": fmean(generations) if generations else 0.0,
        "total_generated_tokens": sum(generations),
        "turns_per_sample/p95": turns_p95,
        "turns_per_sample/p99": turns_p99,
        "max_gen_tokens_per_sample": max(sample.assistant_tokens for sample in samples),
        "max_gen_tokens_per_turn/max": max(longest),
        "max_gen_tokens_per_turn/mean": fmean(longest),
        "max_gen_tokens_per_turn/p95": longest_p95,
        "histogram/gen_tokens_length": generations,
        "histogram/input_tokens_length": inputs,
        "histogram/total_tokens_length": [taken + given for taken, given in zip(inputs, generations, strict=True)],
    }


def spread_by_field(samples: Sequence[SampleMetrics]) -> RequestMetrics:
    """`stddev` is that of a sample (n - 1); of a single value it is 0."""
    spread: RequestMetrics = {}
    for name, field in FIELDS.items():
        values = [getattr(sample, field) for sample in samples]
        spread |= {
            f"{name}/mean": fmean(values),
            f"{name}/max": max(values),
            f"{name}/min": min(values),
            f"{name}/median": median(values),
            f"{name}/stddev": stdev(values) if len(values) > 1 else 0.0,
        }
    return spread
