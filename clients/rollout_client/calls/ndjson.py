"""Reads the lines of streamed rollouts (`service/rollout_requests/result_encoding.py`). No I/O.

Each sample is returned once, with its position. The end is an error unless every position and the summary have arrived:
a response is complete, or it raises.
"""

from collections.abc import Iterator

from pydantic import BaseModel, ConfigDict

from rollout_client.contract.base import Problem, set_fields
from rollout_client.contract.rollouts import RolloutSummary, SampleResult
from rollout_client.errors import ResponseNotUnderstood, StreamBroken, error_of_problem
from rollout_client.json_lines import LineReader
from rollout_client.responses import PlayedRollouts

PositionedSample = tuple[int, SampleResult]
"""A sample with its position in `RolloutResponse.samples`."""


class StreamLine(BaseModel):
    """One line of a stream: `position` and `sample`, or, as the last line, `summary` or `problem`."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    position: int | None = None
    """Index of the sample in the response that is not streamed."""
    sample: SampleResult | None = None
    """A rollout that has ended."""
    summary: RolloutSummary | None = None
    """Every rollout has ended."""
    problem: Problem | None = None
    """The request has failed; no further rollout comes."""


class NdjsonReader:
    """Turns the bytes of a response, in chunks of any size, into the samples of `expected` rollouts.

    Of a request with `keep.where` they are `expected` at most: the summary says how many groups were kept.
    """

    def __init__(self, expected: int, group_size: int = 1) -> None:
        self.expected = expected
        self._group_size = group_size
        self.summary: RolloutSummary | None = None
        self._missing = set(range(expected))
        self._lines = LineReader(StreamLine, "A line of the stream")

    def feed(self, chunk: bytes) -> Iterator[PositionedSample]:
        """Yields the samples whose lines `chunk` completes.

        Raises:
            RequestRejected, ServiceFailed: the service ended the request with a problem.
            StreamBroken: the summary came before the last sample.
            ResponseNotUnderstood: a line is not of the contract.
        """
        for line in self._lines.feed(chunk):
            if positioned := self._read(line):
                yield positioned

    def end(self) -> None:
        """Raises `StreamBroken` unless the summary has come."""
        if self.summary is None:
            raise StreamBroken(
                f"The stream ended after {self._arrived()} rollouts, without summary or problem: the connection or the "
                "service broke."
            )

    def _read(self, content: StreamLine) -> PositionedSample | None:
        if self.summary is not None:
            raise ResponseNotUnderstood("A line of the stream came after its summary.")
        if content.problem is not None:
            raise error_of_problem(content.problem)
        if content.summary is not None:
            self._finish(content.summary)
            return None
        if content.sample is None or content.position not in self._missing:
            raise ResponseNotUnderstood(
                "A line of the stream has no sample, summary or problem, or a position that is not expected: "
                f"{content.position}."
            )
        self._missing.remove(content.position)
        return content.position, content.sample

    def _finish(self, summary: RolloutSummary) -> None:
        expected = self.expected if summary.groups is None else summary.groups.kept * self._group_size
        if not self._missing.isdisjoint(range(expected)):
            raise StreamBroken(f"The summary came after {self._arrived()} rollouts.")
        self.summary = summary

    def _arrived(self) -> str:
        return f"{self.expected - len(self._missing)} of {self.expected}"


class StreamedRollouts:
    """The size and the summary of a stream that `lines` reads."""

    def __init__(self, lines: NdjsonReader) -> None:
        self._lines = lines

    @property
    def expected(self) -> int:
        """The number of rollouts that the request asks for; with `keep.where`, the most that come."""
        return self._lines.expected

    @property
    def summary(self) -> RolloutSummary:
        """Raises `RuntimeError` before the last sample."""
        if self._lines.summary is None:
            raise RuntimeError("The summary comes after the last sample: iterate to the end first.")
        return self._lines.summary


def in_input_order(summary: RolloutSummary, by_position: dict[int, SampleResult]) -> PlayedRollouts:
    return PlayedRollouts(**set_fields(summary), samples=[by_position[position] for position in sorted(by_position)])
