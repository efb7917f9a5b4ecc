"""The lines of a streamed rollout, read without I/O.

Guarantees: every sample is given out once, with its position; the end is an error unless the summary came and every
position with it. So an answer is complete, or it says that it is not.
"""

from collections.abc import Iterator

from pydantic import BaseModel, ConfigDict, ValidationError

from rollout_client.contract import RolloutResponse, RolloutSummary, SampleResult
from rollout_client.errors import AnswerNotUnderstood, StreamBroken, error_of_problem, not_understood
from rollout_client.problem_contract import Problem

Placed = tuple[int, SampleResult]
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
    """Takes the bytes of the answer as they come and gives out the samples of `expected` rollouts."""

    def __init__(self, expected: int) -> None:
        self.expected = expected
        self.summary: RolloutSummary | None = None
        self._missing = set(range(expected))
        self._rest = b""

    def feed(self, chunk: bytes) -> Iterator[Placed]:
        """Yields the samples whose lines `chunk` completes.

        Raises:
            RequestRejected, ServiceFailed: the service ended the request with a problem.
            StreamBroken: the summary came before the last sample.
            AnswerNotUnderstood: a line is not of the contract.
        """
        # Text may hold U+2028 and its like, where httpx's iter_lines would split: lines end at \n only.
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            if placed := self._read(line):
                yield placed

    def end(self) -> None:
        """Raises `StreamBroken` unless the summary has come."""
        if self.summary is None:
            raise StreamBroken(
                f"The stream ended after {self._arrived()} rollouts, without summary or problem: the connection or the "
                "service broke."
            )

    def _read(self, line: bytes) -> Placed | None:
        content = parsed_line(line)
        if self.summary is not None:
            raise AnswerNotUnderstood("A line of the stream came after its summary.")
        if content.problem is not None:
            raise error_of_problem(content.problem)
        if content.summary is not None:
            self._finish(content.summary)
            return None
        if content.sample is None or content.position not in self._missing:
            raise AnswerNotUnderstood(
                "A line of the stream has no sample, summary or problem, or a position that is not awaited: "
                f"{content.position}."
            )
        self._missing.remove(content.position)
        return content.position, content.sample

    def _finish(self, summary: RolloutSummary) -> None:
        if self._missing:
            raise StreamBroken(f"The summary came after {self._arrived()} rollouts.")
        self.summary = summary

    def _arrived(self) -> str:
        return f"{self.expected - len(self._missing)} of {self.expected}"


def parsed_line(line: bytes) -> StreamLine:
    try:
        return StreamLine.model_validate_json(line)
    except ValidationError as error:
        raise not_understood("A line of the stream", error) from error


def in_input_order(summary: RolloutSummary, by_position: dict[int, SampleResult]) -> RolloutResponse:
    return RolloutResponse(**dict(summary), samples=[by_position[position] for position in sorted(by_position)])
