"""The metrics of a request, by the names that NeMo-RL's rollout module gave them."""

from collections.abc import Sequence
from statistics import fmean

from rollout_client.contract import PolicyVersions, SampleResult


def request_metrics(results: Sequence[SampleResult]) -> dict[str, int | float]:
    """Computes the metrics over the samples without error; empty when there is none.

    Token counts leave the prompt's own tokens out. Rates are shares in [0, 1].
    """
    samples = [result.metrics for result in results if result.status != "error"]
    if not samples:
        return {}
    turns = [sample.turn_count for sample in samples]
    rewards = [sample.total_reward for sample in samples]
    generations = [length for sample in samples for length in sample.turn_gen_tokens]
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
        "mean_generation_length": fmean(generations) if generations else 0.0,
        "total_generated_tokens": sum(generations),
    }


def policy_versions(results: Sequence[SampleResult]) -> PolicyVersions:
    """The oldest and newest weights among all tokens of `results`; versions are numbers upward, as text."""
    versions = {
        span.version for result in results for message in result.message_log for span in message.weight_versions or ()
    }
    if not versions:
        return PolicyVersions(oldest=None, newest=None)
    return PolicyVersions(oldest=min(versions, key=int), newest=max(versions, key=int))
