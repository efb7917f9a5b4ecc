"""HTML of a response for a notebook: its figures and its first rollouts. Text from outside is escaped."""

from collections import Counter
from collections.abc import Iterator
from html import escape
from itertools import chain

from rollout_client.contract.rollouts import PolicyVersions, SampleResult
from rollout_client.data_out.response_parts import AnyResponse, parts_of
from rollout_client.results import finish_reasons, last_finish_reason

MOST_ROWS = 8
LONGEST_TEXT = 120
COLUMNS = ("idx", "generation", "task", "status", "reward", "turns", "tokens", "finish", "last message")


def html_of(response: AnyResponse) -> str:
    summary, samples = parts_of(response)
    head = " · ".join([f"{len(samples)} rollouts", *status_counts(samples), *figures(samples, summary.policy)])
    columns = "".join(f"<th>{name}</th>" for name in COLUMNS)
    rows = "".join(f"<tr>{''.join(cells(sample))}</tr>" for sample in samples[:MOST_ROWS])
    hidden = len(samples) - MOST_ROWS
    more = f"<p>and {hidden} more</p>" if hidden > 0 else ""
    return f"<p>{head}</p><table><thead><tr>{columns}</tr></thead><tbody>{rows}</tbody></table>{more}"


def status_counts(samples: list[SampleResult]) -> list[str]:
    return [f"{count} {status}" for status, count in Counter(sample.status for sample in samples).most_common()]


def figures(samples: list[SampleResult], policy: PolicyVersions) -> Iterator[str]:
    rewards = [sample.total_reward for sample in samples if sample.total_reward is not None]
    if rewards:
        yield f"mean reward {sum(rewards) / len(rewards):.3f}"
    if reasons := list(chain.from_iterable(map(finish_reasons, samples))):
        yield f"clipped ratio {reasons.count('length') / len(reasons):.3f}"
    if policy.oldest is not None and policy.newest is not None:
        both = policy.oldest if policy.oldest == policy.newest else f"{policy.oldest} to {policy.newest}"
        yield escape(f"version {both}")


def cells(sample: SampleResult) -> Iterator[str]:
    reward = "" if sample.total_reward is None else f"{sample.total_reward:g}"
    values = (sample.idx, sample.generation_index, sample.task_name, sample.status, reward)
    metrics = sample.metrics
    ending = (last_finish_reason(sample) or "", last_text(sample))
    for value in (*values, metrics.turn_count, metrics.assistant_tokens, *ending):
        yield f"<td>{escape(str(value))}</td>"


def last_text(sample: SampleResult) -> str:
    """The last generated message, or the error if there is none, shortened."""
    generated = [message.content for message in sample.message_log if message.generation_logprobs is not None]
    text = generated[-1] if generated else "" if sample.error is None else sample.error.message
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]}..."
