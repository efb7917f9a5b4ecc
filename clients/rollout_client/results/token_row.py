"""A rollout as one row of tokens: the messages of its log, concatenated without any change."""

from collections.abc import Iterable
from dataclasses import dataclass

from rollout_client.contract.rollouts import Message, SampleResult
from rollout_client.policy_names import read_label

UNKNOWN_VERSION = -1


@dataclass(frozen=True, slots=True)
class TokenRow:
    """The tokens of one message log, in order; every list has one entry per token."""

    token_ids: list[int]
    loss_mask: list[int]
    """1 for a token that the policy generated; 0 for a token of the prompt or of the environment."""
    generation_logprobs: list[float]
    """Natural logarithms; 0 for a token that the policy did not generate."""
    weight_versions: list[int]
    """Numbers, without the name of a named policy; -1 for a token that no policy generated, or whose version the
    service did not report."""
    prompt_length: int
    """Number of tokens before the first generated token; all tokens where none was generated."""

    def without_tail(self) -> "TokenRow":
        """The row up to its last generated token. No generation has seen what the environment said after that token."""
        generated = [place for place, is_generated in enumerate(self.loss_mask) if is_generated]
        return self.part(0, generated[-1] + 1 if generated else len(self.token_ids))

    def part(self, start: int, end: int) -> "TokenRow":
        """The tokens from `start` to before `end`."""
        token_ids = self.token_ids[start:end]
        return TokenRow(
            token_ids,
            self.loss_mask[start:end],
            self.generation_logprobs[start:end],
            self.weight_versions[start:end],
            min(max(self.prompt_length - start, 0), len(token_ids)),
        )


def token_row(sample: SampleResult) -> TokenRow:
    """Raises `ValueError` if a generated message does not have one log-probability per token."""
    row = TokenRow([], [], [], [], prompt_length(sample.message_log))
    for message in sample.message_log:
        count = len(message.token_ids)
        row.token_ids.extend(message.token_ids)
        row.loss_mask.extend([int(message.generation_logprobs is not None)] * count)
        row.generation_logprobs.extend(logprobs_of(message))
        row.weight_versions.extend(versions_of(message))
    return row


def prompt_length(message_log: Iterable[Message]) -> int:
    length = 0
    for message in message_log:
        if message.generation_logprobs:
            break
        length += len(message.token_ids)
    return length


def logprobs_of(message: Message) -> list[float]:
    if message.generation_logprobs is None:
        return [0.0] * len(message.token_ids)
    if len(message.generation_logprobs) != len(message.token_ids):
        raise ValueError(
            f"A message has {len(message.token_ids)} token_ids and {len(message.generation_logprobs)} "
            "generation_logprobs; there must be one for each token."
        )
    return message.generation_logprobs


def versions_of(message: Message) -> list[int]:
    versions = [UNKNOWN_VERSION] * len(message.token_ids)
    if message.generation_logprobs is None:
        return versions
    for span in message.weight_versions or ():
        end = min(span.end, len(versions))
        versions[span.start : end] = [read_label(span.version).number] * (end - span.start)
    return versions
