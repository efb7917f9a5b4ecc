"""The metrics of a sample and of a request, with the names that NeMo-RL's rollout module uses.

A new metric of each sample is a field of the contract's `SampleMetrics`, filled by `MetricCounts`. A new
request metric is one more entry in `_averages`, `_turn_metrics` or `_spread_by_field`.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from statistics import fmean, median, stdev

import numpy as np

from rollout_client.contract.base import label_of, read_label
from rollout_client.contract.messages import FinishReason
from rollout_client.contract.rollouts import PolicyVersions, RequestMetrics, SampleMetrics, SampleResult, SampleStatus
from rollout_client.results import logs_of

UNNAMED_REWARD = "reward"
"""The name of a reward that its environment gave as a single number."""


@dataclass(slots=True)
class MetricCounts:
    """Counts of one episode while it is played, of which its metrics are made. Lengths are in tokens.

    The journal of a job has its fields.
    """

    turn_input_tokens: list[int] = field(default_factory=list)
    turn_gen_tokens: list[int] = field(default_factory=list)
    env_tokens: int = 0
    parse_errors: int = 0
    environment: dict[str, float] = field(default_factory=dict)
    clipped_turns: int = 0
    tokens_by_replica: dict[str, int] = field(default_factory=dict)
    """Generated tokens, without those of unknown replicas."""

    def add_generation(
        self,
        input_tokens: int,
        generated_tokens: int,
        finish_reason: FinishReason | None,
        goes_on: bool = False,
        replica: str = "",
    ) -> None:
        """Counts all parts of one response as one generation.

        Args:
            finish_reason: why the generation is whole; `None` if it was interrupted.
            goes_on: this part continues a response that was interrupted. The part before it is not counted if it was
                posted.
            replica: the one that generated it; empty if it is not known.
        """
        if goes_on and self.turn_gen_tokens:
            self.turn_gen_tokens[-1] += generated_tokens
        else:
            self.turn_input_tokens.append(input_tokens)
            self.turn_gen_tokens.append(generated_tokens)
        self.clipped_turns += finish_reason == "length"
        if replica:
            self.tokens_by_replica[replica] = self.tokens_by_replica.get(replica, 0) + generated_tokens

    def add_environment_metrics(self, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self.environment[name] = self.environment.get(name, 0.0) + value

    def metrics(
        self, status: SampleStatus | None, terminated: bool, truncated: bool, total_reward: float | None
    ) -> SampleMetrics:
        """Counts only what was played here, not the turns of a message log that was posted."""
        assistant_tokens = sum(self.turn_gen_tokens)
        metrics = SampleMetrics.model_construct(
            turn_count=len(self.turn_gen_tokens),
            total_tokens=assistant_tokens + self.env_tokens,
            assistant_tokens=assistant_tokens,
            env_tokens=self.env_tokens,
            terminated=terminated,
            truncated=truncated,
            max_turns_reached=status == "max_turns",
            total_reward=total_reward,
            turn_gen_tokens=self.turn_gen_tokens.copy(),
            turn_input_tokens=self.turn_input_tokens.copy(),
        )
        if self.parse_errors:
            metrics.parse_errors = self.parse_errors
        if self.clipped_turns:
            metrics.clipped_turns = self.clipped_turns
        if self.environment:
            metrics.environment = self.environment.copy()
        return metrics


FREED_IN_ONE_STEP = 64
NO_TOKENS: Mapping[str, int] = {}
STATUSES_WITH_FINAL_REWARD = ("completed", "truncated", "max_turns")
SPREAD_FIELDS = {
    "turns_per_sample": "turn_count",
    "total_tokens_per_sample": "total_tokens",
    "gen_tokens_per_sample": "assistant_tokens",
    "env_tokens_per_sample": "env_tokens",
    "total_reward": "total_reward",
}
"""Each metric of `_spread_by_field` with the field of `SampleMetrics` that it is computed from."""


class RequestMetricsAccumulator:
    """Collects the results of a request as its samples end, and computes the metrics over them.

    Samples that failed or were cut off are in no metric, because their rewards are not final, except for those that
    staleness cut off: `stale_rate` is their share.
    """

    def __init__(self, policy: str | None = None) -> None:
        """Begins without samples; `policy` is the name of the policy that the request names, if it does."""
        self._policy = policy
        self._samples: list[SampleMetrics] = []
        self._versions: set[str] = set()
        self._rewards: list[dict[str, float]] = []
        """Rewards of the samples whose rewards have names."""
        self._staleness: list[int] = []
        self._stale = 0
        self._tokens_by_replica: Counter[str] = Counter()

    def add(
        self, result: SampleResult, staleness: int | None = None, tokens_by_replica: Mapping[str, int] = NO_TOKENS
    ) -> None:
        """Adds one sample. Weight versions are collected from every sample, also from those that are in no metric.

        Args:
            staleness: the age of its oldest token, in versions, at its end; `None` if it is not known.
            tokens_by_replica: its generated tokens, by the replicas that are known.
        """
        if result.status in STATUSES_WITH_FINAL_REWARD:
            self._samples.append(result.metrics)
            self._tokens_by_replica.update(tokens_by_replica)
            if result.rewards.keys() - {UNNAMED_REWARD}:
                self._rewards.append(result.rewards)
            if staleness is not None:
                self._staleness.append(staleness)
        self._stale += result.status == "stale"
        messages = chain.from_iterable(logs_of(result))
        self._versions.update(span.version for message in messages for span in message.weight_versions or ())

    def metrics(self) -> RequestMetrics:
        """Lengths are in tokens; rates are in [0, 1]. Empty without any sample.

        The prompts' own tokens are in `histogram/input_tokens_length` and `histogram/total_tokens_length` alone.
        """
        samples = self._samples
        if not (samples or self._stale):
            return {}
        of_samples = {**_averages(samples), **_turn_metrics(samples), **_spread_by_field(samples)} if samples else {}
        if self._tokens_by_replica:
            of_samples["per_worker_token_counts"] = dict(self._tokens_by_replica)
        return (
            of_samples
            | _spread_by_name("rewards", self._rewards)
            | _spread_by_name("environment", [sample.environment for sample in samples])
            | {"histogram/staleness": self._staleness.copy(), "stale_rate": self._stale / (len(samples) + self._stale)}
        )

    def free_samples(self) -> None:
        """Forgets all samples, in portions: a thread may do it beside the event loop."""
        for items in (self._samples, self._rewards):
            while items:
                del items[-FREED_IN_ONE_STEP:]

    def policy(self, current: int | None = None) -> PolicyVersions:
        """The oldest and the newest weight version that sampled a token, and the `current` one, if it is known."""
        of_policy = [label for label in map(read_label, self._versions) if label.name == self._policy]
        return policy_versions(self._policy, [label.number for label in of_policy], current)


def policy_versions(policy: str | None, versions: Collection[int], current: int | None) -> PolicyVersions:
    """These versions of one policy as an answer names them; `None` is the policy without a name."""
    return PolicyVersions(
        oldest=label_of(policy, min(versions)) if versions else None,
        newest=label_of(policy, max(versions)) if versions else None,
        current=None if current is None else label_of(policy, current),
    )


def _averages(samples: Sequence[SampleMetrics]) -> RequestMetrics:
    """Sums, means and extremes over samples, of which there is at least one."""
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
        "total_parse_errors": sum(sample.parse_errors for sample in samples),
    }


def _turn_metrics(samples: Sequence[SampleMetrics]) -> RequestMetrics:
    """Metrics of single generations, and of the longest generation of each sample. Percentiles interpolate linearly."""
    generations = [length for sample in samples for length in sample.turn_gen_tokens]
    inputs = [length for sample in samples for length in sample.turn_input_tokens]
    longest = [max(sample.turn_gen_tokens, default=0) for sample in samples]
    turns = [sample.turn_count for sample in samples]
    return {
        "mean_generation_length": fmean(generations) if generations else 0.0,
        "total_generated_tokens": sum(generations),
        "clipped_ratio": sum(sample.clipped_turns for sample in samples) / len(generations) if generations else 0.0,
        "turns_per_sample/p95": _percentile(turns, 95),
        "turns_per_sample/p99": _percentile(turns, 99),
        "max_gen_tokens_per_sample": max(sample.assistant_tokens for sample in samples),
        "max_gen_tokens_per_turn/max": max(longest),
        "max_gen_tokens_per_turn/mean": fmean(longest),
        "max_gen_tokens_per_turn/p95": _percentile(longest, 95),
        "histogram/gen_tokens_length": generations,
        "histogram/input_tokens_length": inputs,
        "histogram/total_tokens_length": [taken + given for taken, given in zip(inputs, generations, strict=True)],
    }


def _percentile(values: Sequence[float], percent: float) -> float:
    """The percentile of values, of which there is at least one. Interpolates linearly."""
    return float(np.percentile(values, percent))


def _spread_by_field(samples: Sequence[SampleMetrics]) -> RequestMetrics:
    """Mean, extremes, median and sample standard deviation (n - 1) of each field; `stddev` of a single value is 0."""
    spread: RequestMetrics = {}
    for name, of_sample in SPREAD_FIELDS.items():
        spread |= _spread_of(name, [getattr(sample, of_sample) for sample in samples])
    return spread


def _spread_by_name(kind: str, of_each: Sequence[Mapping[str, float]]) -> RequestMetrics:
    """The spread of each named value, over the samples that have it, in the order of their first samples."""
    values: dict[str, list[float]] = {}
    for named in of_each:
        for name, value in named.items():
            values.setdefault(name, []).append(value)
    spread: RequestMetrics = {}
    for name, of_samples in values.items():
        spread |= _spread_of(f"{kind}/{name}", of_samples)
    return spread


def _spread_of(name: str, values: Sequence[float]) -> RequestMetrics:
    """`values` has at least one."""
    return {
        f"{name}/mean": fmean(values),
        f"{name}/max": max(values),
        f"{name}/min": min(values),
        f"{name}/median": median(values),
        f"{name}/stddev": stdev(values) if len(values) > 1 else 0.0,
    }
