"""How many versions behind the trainer's the weights were that sampled the tokens of a rollout."""

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollout_client.contract.rollouts import RolloutResponse, SampleResult
from rollout_client.policy_names import read_label

if TYPE_CHECKING:
    from rollout_client.arrow.bodies import ArrowResponse


@dataclass(frozen=True, slots=True)
class Staleness:
    """Statistics over the generated tokens whose weight version is known; each token has the same weight.

    The lag of a token is `trainer_version` less the version that made it: 0 is on-policy, and below 0 the service was
    ahead. Without such tokens all but the counts are `None`.
    """

    tokens: int
    """Generated tokens whose version is known."""
    unknown_tokens: int
    """Generated tokens without a version of this policy: those of a posted message log that had none, or another's."""
    oldest: int | None = None
    """The lowest version that made a token."""
    newest: int | None = None
    """The highest version that made a token."""
    mean_lag: float | None = None
    max_lag: int | None = None
    """That of the oldest version."""


def staleness(
    rollouts: "SampleResult | RolloutResponse | ArrowResponse", trainer_version: int, name: str | None = None
) -> Staleness:
    """The staleness of one rollout, or of all rollouts of a response together, failed and stale ones included.

    Args:
        trainer_version: the version of the weights that are trained with these rollouts, as the trainer pushed them.
        name: the policy that it is a version of; by default the one without a name.
    """
    samples = [rollouts] if isinstance(rollouts, SampleResult) else rollouts.samples
    tokens_by_version: Counter[int] = Counter()
    generated = 0
    for message in (message for sample in samples for message in sample.message_log):
        if message.generation_logprobs is not None:
            generated += len(message.token_ids)
            for span in message.weight_versions or []:
                label = read_label(span.version)
                if label.name == name:
                    tokens_by_version[label.number] += span.end - span.start
    tokens_by_version = +tokens_by_version
    tokens = tokens_by_version.total()
    if not tokens:
        return Staleness(tokens=0, unknown_tokens=generated)
    oldest = min(tokens_by_version)
    lag = sum((trainer_version - version) * count for version, count in tokens_by_version.items())
    return Staleness(
        tokens=tokens,
        unknown_tokens=generated - tokens,
        oldest=oldest,
        newest=max(tokens_by_version),
        mean_lag=lag / tokens,
        max_lag=trainer_version - oldest,
    )
