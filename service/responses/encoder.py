"""The protocol of the encoders that turn the rollouts of a request into the bytes of one whole response."""

from collections.abc import Iterator
from typing import Protocol

from rollout_client.contract import RolloutSummary, SampleResult


class ResponseEncoder(Protocol):
    """Encodes each rollout as soon as it has ended, so that little work is left after the last one.

    `add` is called once per position, in any order; then `body` is called once.
    """

    media_type: str

    def add(self, position: int, result: SampleResult) -> None:
        """Encodes one rollout. `position` is its index in the response."""
        ...

    def body(self, summary: RolloutSummary) -> Iterator[bytes | memoryview]:
        """Yields the bytes of the response, the rollouts in order of their positions."""
        ...
