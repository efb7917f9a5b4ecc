"""What turns the results of a request into the bytes of its response."""

from collections.abc import Iterator
from typing import Protocol

from rollout_client.contract import RolloutSummary, SampleResult


class ResponseEncoder(Protocol):
    """Takes the samples of a request as they end, then has the bytes of the whole response."""

    media_type: str

    def add(self, position: int, result: SampleResult) -> None: ...

    def body(self, summary: RolloutSummary) -> Iterator[bytes | memoryview]: ...
