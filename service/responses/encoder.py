"""The protocol of the encoders that turn the rollouts of a request into the bytes of one whole response."""

from collections.abc import Iterator
from typing import Protocol

from rollout_client.contract import RolloutSummary, SampleResult
from service.rollouts.episode_records import Echo


class ResponseEncoder(Protocol):
    """Encodes each rollout as soon as it has ended, so that little work is left after the last one.

    What the rollouts of a group repeat of their sample is held once until `body` writes it.

    `add` is called once per position, in any order; then `body` is called once.
    """

    media_type: str

    def add(self, position: int, result: SampleResult, echo: Echo | None = None) -> None:
        """Encodes one rollout.

        Args:
            position: its index in the response.
            echo: what it repeats of its sample; the same object for all rollouts of a group.
        """
        ...

    def body(self, summary: RolloutSummary) -> Iterator[bytes | memoryview]:
        """Yields the bytes of the response, the rollouts in order of their positions."""
        ...
