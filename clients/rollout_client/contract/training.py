"""The predicate that says what of a rollout may be trained; every reader of tokens asks it. No I/O."""

from collections.abc import Mapping
from typing import Any

from rollout_client.contract.messages import Message


def may_be_trained(message: Message | Mapping[str, Any]) -> bool:
    """Whether the tokens of a message may be in a loss: they are samples of the policy, and of nothing else.

    Those are not that no policy generated (without `generation_logprobs`), whose call made tokens more or less likely
    whatever the policy says (`constrained`), and those of a greedy call in a request that samples (`sampled_with`):
    nothing was drawn, and its log-probabilities are of no distribution that was sampled. Where the whole request is
    greedy its messages say nothing, and are trained by whoever asked for that.

    Args:
        message: a message, or its fields as JSON has them.
    """
    sampled_with = _field_of(message, "sampled_with")
    is_greedy = sampled_with is not None and _field_of(sampled_with, "temperature") == 0
    is_generated = _field_of(message, "generation_logprobs") is not None
    return is_generated and not _field_of(message, "constrained") and not is_greedy


def may_be_compared(message: Message | Mapping[str, Any]) -> bool:
    """Whether a trainer that computes with the request's temperature should find the message's log-probabilities: it
    may be trained, and was sampled as the request says."""
    return may_be_trained(message) and _field_of(message, "sampled_with") is None


def _field_of(given: Any, name: str) -> Any:
    """The field of a model, or of a mapping that may lack it."""
    return given.get(name) if isinstance(given, Mapping) else getattr(given, name)
