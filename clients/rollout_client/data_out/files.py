"""Files of rollouts: those that `save` and `rollout run` write, and the answers of the service as they came."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self, TypeVar

from pydantic import ValidationError, model_validator
from pydantic_core import to_json

from rollout_client.contract.base import Lenient, Problem, set_fields
from rollout_client.contract.jobs import PositionedResult
from rollout_client.contract.rollouts import RolloutResponse, RolloutSummary, SampleResult
from rollout_client.data_out.response_parts import AnyResponse, parts_of
from rollout_client.errors import error_of_problem
from rollout_client.json_lines import numbered_lines

JSON_LINES = ".jsonl"
PARQUET = ".parquet"
ANSWERS = (".json", ".ndjson")
"""Endings of files with an answer of `POST /rollout` as it came; `.ndjson` may also be the events of a job."""
SUMMARY_LINE = b'{"summary":'
"""Beginning of the last line of a file that `save` wrote."""

Response = TypeVar("Response", bound=RolloutResponse)


def save_response(response: AnyResponse, path: Path) -> None:
    if is_parquet(path):
        from rollout_client.data_out.table import write_parquet

        write_parquet(response, path)
        return
    summary, samples = parts_of(response)
    with path.open("wb") as file:
        for sample in samples:
            file.write(json_line(sample))
        file.write(SUMMARY_LINE + to_json(summary.model_dump(exclude_unset=True)) + b"}\n")


def json_line(sample: SampleResult, **further: Any) -> bytes:
    """One rollout, with `further` fields, as a line of a file. Numbers come back as they are, infinite ones too."""
    return to_json({**sample.model_dump(exclude_unset=True), **further}) + b"\n"


def load_response(kind: type[Response], path: Path) -> Response:
    file = RolloutFile(path)
    samples = list(file.rollouts())
    if file.summary is None:
        raise ValueError(f"{path} has no summary: a file that `save` wrote whole has one.")
    return kind(**set_fields(file.summary), samples=samples)


def read_rollouts(path: str | Path) -> Iterator[SampleResult]:
    """The rollouts of a file, one after the other.

    Args:
        path: a `.jsonl` or `.parquet` file that `save` or `rollout run` wrote; or an answer of the service as it came,
            in JSON (`.json`), or as a stream of lines or the events of a job (`.ndjson`).

    Raises:
        ValueError: the name has another ending, or the file does not hold rollouts; the message names the line or row.
        RolloutError: the answer in the file says that the request has failed.
        ModuleNotFoundError: `.parquet` without the extra `arrow`.
    """
    return RolloutFile(Path(path)).rollouts()


class RolloutFile:
    """A file of rollouts, read once from its beginning to its end."""

    def __init__(self, path: Path) -> None:
        self.summary: RolloutSummary | None = None
        """Summary of the request, after the last rollout was read."""
        self._path = path
        if path.suffix not in (endings := (JSON_LINES, PARQUET, *ANSWERS)):
            raise ValueError(f"{path} must end in {', '.join(endings)}, which says how it is read.")

    def rollouts(self) -> Iterator[SampleResult]:
        readers = {PARQUET: self._of_parquet, ".json": self._of_json}
        return readers.get(self._path.suffix, self._of_lines)()

    def _of_parquet(self) -> Iterator[SampleResult]:
        from rollout_client.data_out.table import read_parquet

        self.summary, samples = read_parquet(self._path)
        yield from samples

    def _of_json(self) -> Iterator[SampleResult]:
        try:
            response = RolloutResponse.model_validate_json(self._path.read_bytes())
        except ValidationError as error:
            raise ValueError(f"{self._path} is not an answer with rollouts: {reason(error)}.") from error
        self.summary, samples = parts_of(response)
        yield from samples

    def _of_lines(self) -> Iterator[SampleResult]:
        with self._path.open("rb") as lines:
            for number, line in numbered_lines(lines):
                try:
                    if line.startswith(SUMMARY_LINE):
                        self.summary = RolloutSummary.model_validate_json(line[len(SUMMARY_LINE) : line.rindex(b"}")])
                    elif self._path.suffix == JSON_LINES:
                        yield SampleResult.model_validate_json(line)
                    else:
                        yield from self._of_answer(StreamedLine.model_validate_json(line))
                except ValidationError as error:
                    raise ValueError(f"{self._path} line {number} is not a rollout: {reason(error)}.") from error

    def _of_answer(self, line: "StreamedLine") -> Iterator[SampleResult]:
        if line.problem is not None:
            raise error_of_problem(line.problem)
        self.summary = line.summary or self.summary
        yield from (positioned.sample for positioned in line.samples)
        if line.sample is not None:
            yield line.sample


class StreamedLine(Lenient):
    """A line of a streamed answer, or an event of a job."""

    sample: SampleResult | None = None
    samples: list[PositionedResult] = []  # noqa: RUF012 - pydantic copies it
    summary: RolloutSummary | None = None
    problem: Problem | None = None

    @model_validator(mode="after")
    def has_something(self) -> Self:
        if not self.model_fields_set & set(type(self).model_fields):
            raise ValueError("neither a line of an answer nor an event of a job")
        return self


def reason(error: ValidationError) -> str:
    """First finding of the validation, with its place."""
    finding = error.errors(include_url=False)[0]
    place = ".".join(str(part) for part in finding["loc"])
    return f"{place}: {finding['msg']}" if place else finding["msg"]


def is_parquet(path: Path) -> bool:
    """Whether `path` is a Parquet file by its name. Raises `ValueError` for a name of neither format."""
    if path.suffix not in (JSON_LINES, PARQUET):
        raise ValueError(f"{path} must end in {JSON_LINES} or {PARQUET}, which says how it is written.")
    return path.suffix == PARQUET
