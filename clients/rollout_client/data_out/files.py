"""Files of rollouts: those that `save` and `rollout run` write, and the answers of the service as they came."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Self, TypeVar

from pydantic import ValidationError, model_validator
from pydantic_core import to_json

from rollout_client.contract.base import Lenient, Problem, set_fields
from rollout_client.contract.jobs import PositionedResult
from rollout_client.contract.rollouts import RolloutResponse, RolloutSummary, SampleResult
from rollout_client.data_out.response_parts import AnyResponse, parts_of
from rollout_client.errors import error_of_problem
from rollout_client.json_lines import BYTE_ORDER_MARK, numbered_lines

JSON_LINES, PARQUET, ANSWER, STREAMED = ".jsonl", ".parquet", ".json", ".ndjson"
SUMMARY_LINE = b'{"summary":'
"""Beginning of the last line of a file that `save` wrote."""

Part = RolloutSummary | SampleResult
Response = TypeVar("Response", bound=RolloutResponse)


def save_response(response: AnyResponse, path: Path) -> None:
    if path.suffix == PARQUET:
        from rollout_client.data_out.table import write_parquet

        write_parquet(response, path)
        return
    if path.suffix != JSON_LINES:
        raise ValueError(f"{path} must end in {JSON_LINES} or {PARQUET}, which says how it is written.")
    summary, samples = parts_of(response)
    with path.open("wb") as file:
        file.writelines(map(json_line, samples))
        file.write(SUMMARY_LINE + to_json(summary.model_dump(exclude_unset=True)) + b"}\n")


def json_line(sample: SampleResult, **further: Any) -> bytes:
    """One rollout, with `further` fields, as a line of a file. Numbers come back as they are, infinite ones too."""
    return to_json({**sample.model_dump(exclude_unset=True), **further}) + b"\n"


def load_response(kind: type[Response], path: Path) -> Response:
    parts = list(read_parts(path))
    samples = [part for part in parts if isinstance(part, SampleResult)]
    summaries = [part for part in parts if isinstance(part, RolloutSummary)]
    if not summaries:
        raise ValueError(f"{path} has no summary: a file that `save` wrote whole has one.")
    return kind(**set_fields(summaries[-1]), samples=samples)


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
    return (part for part in read_parts(Path(path)) if isinstance(part, SampleResult))


def read_parts(path: Path) -> Iterator[Part]:
    """The rollouts of a file, and its summary if it has one."""
    if path.suffix == PARQUET:
        from rollout_client.data_out.table import read_parquet

        yield from read_parquet(path)
    elif path.suffix == ANSWER:
        try:
            response = RolloutResponse.model_validate_json(path.read_bytes())
        except ValidationError as error:
            raise ValueError(f"{path} is not an answer with rollouts: {reason(error)}.") from error
        summary, samples = parts_of(response)
        yield summary
        yield from samples
    elif path.suffix in (JSON_LINES, STREAMED):
        with path.open("rb") as lines:
            try:
                if path.suffix == JSON_LINES:
                    yield from (part for part, _ in parts_of_lines(lines))
                else:
                    yield from streamed_parts(lines)
            except ValueError as error:
                raise ValueError(f"{path} {error}.") from error
    else:
        endings = ", ".join((JSON_LINES, PARQUET, ANSWER, STREAMED))
        raise ValueError(f"{path} must end in {endings}, which says how it is read.")


def parts_of_lines(lines: Iterable[bytes], may_be_torn: bool = False) -> Iterator[tuple[Part, int]]:
    """The rollouts and the summary in JSON lines, each with the number of bytes up to the end of its line.

    Args:
        may_be_torn: whether the last line may be any part of one, which is left out: a kill leaves such a line.

    Raises:
        ValueError: another line is not a rollout; the message begins with its number.
    """
    end = 0
    problem: ValueError | None = None
    for number, line in enumerate(lines, start=1):
        if problem is not None:
            raise problem
        end += len(line)
        content = line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line
        if (may_be_torn and not line.endswith(b"\n")) or not content.strip():
            continue
        try:
            is_summary = content.startswith(SUMMARY_LINE)
            found = StreamedLine.model_validate_json(content).summary if is_summary else None
            yield found or SampleResult.model_validate_json(content), end
        except ValidationError as error:
            problem = not_a_rollout(number, error)
    if problem is not None and not may_be_torn:
        raise problem


def streamed_parts(lines: Iterable[bytes]) -> Iterator[Part]:
    for number, content in numbered_lines(lines):
        try:
            line = StreamedLine.model_validate_json(content)
        except ValidationError as error:
            raise not_a_rollout(number, error) from error
        if line.problem is not None:
            raise error_of_problem(line.problem)
        yield from (positioned.sample for positioned in line.samples)
        yield from filter(None, (line.sample, line.summary))


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


def not_a_rollout(number: int, error: ValidationError) -> ValueError:
    return ValueError(f"line {number} is not a rollout: {reason(error)}")


def reason(error: ValidationError) -> str:
    """First finding of the validation, with its place."""
    finding = error.errors(include_url=False)[0]
    place = ".".join(str(part) for part in finding["loc"])
    return f"{place}: {finding['msg']}" if place else finding["msg"]
