"""What is wrong with the versions that a rollout names for its tokens. No I/O."""

from collections.abc import Iterator, Sequence

from rollout_client.contract.messages import Message
from tests.endurance.soak.version_times import VersionTimes


def span_problems(
    messages: Sequence[Message], times: VersionTimes, begin: float, end: float, min_version: int
) -> Iterator[str]:
    """A sentence for each thing that is wrong.

    The spans of each generated message cover its tokens in order; no version is older than the one before it, or than
    `min_version`; each one could be current between `begin` and `end`, between which the rollout was played.
    """
    newest = min_version
    for place, message in enumerate(messages):
        if message.generation_logprobs is None:
            continue
        position = 0
        for span in message.weight_versions or ():
            version = int(span.version)
            if span.start != position or span.end <= span.start:
                yield f"message {place}: a span from {span.start} to {span.end} follows one that ends at {position}"
            position = span.end
            if version < newest:
                yield f"message {place}: a token of version {version} after version {newest}"
            newest = max(newest, version)
            if not times.could_be_current(version, begin, end):
                yield f"message {place}: version {version} was not current while the rollout was played"
        tokens, logprobs = len(message.token_ids), len(message.generation_logprobs)
        if not position == logprobs == tokens:
            yield f"message {place}: spans to {position} and {logprobs} log-probabilities for {tokens} tokens"
