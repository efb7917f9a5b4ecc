"""Parses the bodies of `POST /rollout`, `/score` and `/rollouts/logprobs`: from untrusted bytes to valid requests.

Guarantees: whatever the body holds, at most about `MOST_PROBLEMS` of its problems are built, and one of the sequences
of a `POST /score`; every part of the result is bounded, so that the work for one sample is short.
"""

import gc
import pickle
import signal
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from deployments.protocols.generation import packed_ids
from deployments.rollout_records.comparison import TrainerReport
from rollout_client.contract.base import FieldProblem, PolicyDemand, Priority
from rollout_client.contract.info import ScoreRequest
from rollout_client.contract.records import LogprobsReport, ReportedRollout
from rollout_client.contract.rollouts import RolloutRequest, SampleInput
from service.problems import (
    MOST_PROBLEMS,
    found_problem,
    invalid_request,
    parsed_json,
    parsed_model,
    unknown_token,
)

SAMPLES_AT_ONCE = 64
"""Samples that are validated in one call: it holds the interpreter's lock for about a millisecond."""
MOST_FIELDS = 64
"""Fields of an object that the contract defines. Each unknown field is a problem of its own."""
OBJECTS_OF_A_REQUEST = ("sampling", "keep", "policy")
FIELDS_WITH_MESSAGES = ("messages", "message_log")


PartsOf = Callable[[bytes], Iterable[Any]]
"""Parses a body in another process. Gives the request in parts, each of which is pickled alone."""


def prepare_process() -> None:
    """Prepares a process that parses bodies."""
    # Ctrl-C in a terminal is for the parent.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Millions of new objects would trigger it again and again, to find nothing. `parse_file` collects.
    gc.disable()
    gc.freeze()


def parse_file(parts_of: PartsOf, path: str) -> None:
    """Replaces the body in a file by the pickles of its parts, in another process. Raises `RequestProblem`."""
    with Path(path).open("r+b") as file:
        body = file.read()
        file.seek(0)
        file.truncate()
        try:
            for part in parts_of(body):
                pickle.dump(part, file, pickle.HIGHEST_PROTOCOL)
        finally:
            gc.collect()


@dataclass(frozen=True, slots=True)
class BodyBounds:
    """Limits of one body."""

    max_rollouts: int
    max_sample_bytes: int


def parsed_body(body: bytes | bytearray) -> RolloutRequest:
    """Parses and validates a small body in one step.

    Raises:
        RequestProblem: 400 or 422, the problems of the body.
    """
    return parsed_model(body, RolloutRequest)


def request_parts(body: bytes | bytearray, bounds: BodyBounds) -> Iterator[Any]:
    """The fields of a large body other than its samples, then each sample. All are within `bounds`.

    Raises:
        RequestProblem: 400 or 422, the first `MOST_PROBLEMS` problems of the body, before the first part.
    """
    fields = parsed_json(body)
    if problems := list(islice(_body_size_problems(fields, bounds), MOST_PROBLEMS)):
        raise invalid_request(*problems)
    if findings := list(islice(_findings(fields), MOST_PROBLEMS)):
        raise found_problem(findings)
    yield {name: value for name, value in fields.items() if name != "samples"}
    yield from fields.get("samples", ())


def _findings(fields: Any) -> Iterator[ErrorDetails]:
    """The errors of pydantic, `SAMPLES_AT_ONCE` samples at a time, the other fields with the first of them."""
    samples = fields.get("samples") if isinstance(fields, dict) else None
    if not isinstance(samples, list):
        yield from _errors_of(fields)
        return
    for first in range(0, max(len(samples), 1), SAMPLES_AT_ONCE):
        some = {"samples": samples[first : first + SAMPLES_AT_ONCE]}
        for finding in _errors_of(some if first else {**fields, **some}):
            match finding["loc"]:
                case ("samples", int(place), *rest):
                    finding["loc"] = ("samples", place + first, *rest)
            yield finding


def _errors_of(fields: Any) -> Sequence[ErrorDetails]:
    try:
        RolloutRequest.model_validate(fields, strict=True)
    except ValidationError as error:
        return error.errors(include_url=False)
    return ()


def _body_size_problems(fields: Any, bounds: BodyBounds) -> Iterator[FieldProblem]:
    """Yields the parts that are too large, before anything is validated."""
    if not isinstance(fields, dict):
        return
    yield from _object_problems("body", fields)
    for name in OBJECTS_OF_A_REQUEST:
        yield from _nested_object_problems(name, fields.get(name))
    samples = fields.get("samples")
    if not isinstance(samples, list):
        return
    given = fields.get("num_generations")
    num_generations = given if type(given) is int and given > 0 else 1
    if problem := rollouts_problem(len(samples), num_generations, bounds.max_rollouts):
        yield problem
        return
    for place, sample in enumerate(samples):
        if isinstance(sample, dict):
            yield from _sample_size_problems(f"samples[{place}]", sample, bounds.max_sample_bytes)


def rollouts_problem(samples: int, num_generations: int, max_rollouts: int) -> FieldProblem | None:
    """The problem of too many rollouts, if there are too many."""
    if samples * num_generations <= max_rollouts:
        return None
    message = (
        f"{samples} samples x {num_generations} generations is more than {max_rollouts} rollouts; split the request"
    )
    return FieldProblem(field="samples", message=message, value=samples)


def _object_problems(field: str, value: Any) -> Iterator[FieldProblem]:
    if isinstance(value, dict) and len(value) > MOST_FIELDS:
        message = f"it has {len(value)} fields; send at most {MOST_FIELDS}"
        yield FieldProblem(field=field, message=message, value=len(value))


def _nested_object_problems(field: str, value: Any) -> Iterator[FieldProblem]:
    """Yields the objects in `value`, itself included, that have too many fields."""
    if isinstance(value, dict):
        yield from _object_problems(field, value)
        for name, inside in islice(value.items(), MOST_FIELDS):
            yield from _nested_object_problems(f"{field}.{name}", inside)


def _sample_size_problems(field: str, sample: Mapping[str, Any], most_bytes: int) -> Iterator[FieldProblem]:
    if (size := len(pickle.dumps(sample, pickle.HIGHEST_PROTOCOL))) > most_bytes:
        message = f"it takes {size} bytes, and a sample may take {most_bytes}; shorten it"
        yield FieldProblem(field=field, message=message, value=size)
    for name in FIELDS_WITH_MESSAGES:
        messages = sample.get(name)
        for place, message in enumerate(messages if isinstance(messages, list) else ()):
            yield from _object_problems(f"{field}.{name}[{place}]", message)


def joined_request(options: Mapping[str, Any], samples: Iterable[dict[str, Any]]) -> RolloutRequest:
    """The request of its `request_parts`. No step of it takes longer than the largest sample needs."""
    valid = [SampleInput.model_validate(sample, strict=True) for sample in samples]
    request = RolloutRequest.model_validate({**options, **({"samples": valid[:1]} if valid else {})}, strict=True)
    request.samples = valid
    return request


MOST_NUMBERS = 2**26
"""Limit of an answer: 64 million log-probabilities and token ids are about 1 GB of JSON."""


@dataclass(frozen=True, slots=True)
class ScoreBounds:
    """Limits of one request."""

    max_sequences: int
    max_model_len: int
    vocab_size: int
    image_token_ids: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class ParsedScoreRequest:
    """A request whose token ids are arrays."""

    sequences: Sequence["array[int]"]
    starts: Sequence[int]
    """The first position of each sequence that is asked for."""
    top_k: int
    policy: PolicyDemand
    priority: Priority
    retries: int

    @property
    def tokens(self) -> int:
        return sum(map(len, self.sequences))


def parsed_score_request(body: bytes | bytearray, bounds: ScoreBounds) -> ParsedScoreRequest:
    """Parses the body. Raises `RequestProblem`: 400 or 422, its problems."""
    request = parsed_model(body, ScoreRequest)
    for problem in _score_problems(request, bounds):
        raise invalid_request(problem)
    starts = request.start if isinstance(request.start, list) else [request.start] * len(request.sequences)
    sequences = [packed_ids(token_ids) for token_ids in request.sequences]
    return ParsedScoreRequest(sequences, starts, request.top_k, request.policy, request.priority, request.retries)


def _score_problems(request: ScoreRequest, bounds: ScoreBounds) -> Iterator[FieldProblem]:
    """Yields the problems of a request whose fields are valid one by one."""
    count, starts = len(request.sequences), request.start
    if count > bounds.max_sequences:
        message = f"{count} sequences are more than {bounds.max_sequences}; split the request"
        yield FieldProblem(field="sequences", message=message, value=count)
    if isinstance(starts, list) and len(starts) != count:
        message = f"it has {len(starts)} positions for {count} sequences; send one for each, or one number"
        yield FieldProblem(field="start", message=message, value=len(starts))
        return
    numbers = sum(map(len, request.sequences)) * (1 + 2 * request.top_k)
    if numbers > MOST_NUMBERS:
        message = f"the answer would have {numbers} numbers, and may have {MOST_NUMBERS}; split the request"
        yield FieldProblem(field="sequences", message=message, value=numbers)
    for place, token_ids in enumerate(request.sequences):
        start = starts[place] if isinstance(starts, list) else starts
        yield from sequence_problems(f"sequences[{place}]", token_ids, start, request.top_k, bounds)


def sequence_problems(
    field: str, token_ids: Sequence[int], start: int, top_k: int, bounds: ScoreBounds
) -> Iterator[FieldProblem]:
    # The engine names the most likely tokens only of positions that a further token can follow.
    most_tokens = bounds.max_model_len - bool(top_k)
    if len(token_ids) > most_tokens:
        with_top_k = " with top_k" if top_k else ""
        message = f"it has {len(token_ids)} tokens; the model takes at most {most_tokens}{with_top_k}"
        yield FieldProblem(field=field, message=message, value=len(token_ids))
    if problem := unknown_token(field, token_ids, bounds.vocab_size):
        yield problem
    if images := [image for image in bounds.image_token_ids if image in token_ids]:
        message = f"{images[0]} means an image, and text alone is scored; leave out sequences that show images"
        yield FieldProblem(field=f"{field}[{token_ids.index(images[0])}]", message=message, value=images[0])
    if start >= len(token_ids):
        message = f"{field} has {len(token_ids)} tokens; its last position is {len(token_ids) - 1}"
        yield FieldProblem(field="start", message=message, value=start)


def score_request_parts(body: bytes | bytearray, bounds: ScoreBounds) -> Iterator[Any]:
    """All of the parsed request but its sequences, then each sequence. Raises what `parsed_score_request` raises."""
    request = parsed_score_request(body, bounds)
    yield replace(request, sequences=())
    yield from request.sequences


def parsed_reports(body: bytes | bytearray) -> list[TrainerReport]:
    """Raises `RequestProblem`: the body is not a `LogprobsReport`."""
    given = parsed_model(body, LogprobsReport)
    try:
        return [_report_of(report) for report in given.reports]
    except OverflowError as error:
        raise invalid_request(FieldProblem(field="reports", message=f"a number is out of range: {error}")) from error


def _report_of(given: ReportedRollout) -> TrainerReport:
    return TrainerReport(
        given.rollout_id,
        # Null becomes NaN.
        np.array(given.logprobs, np.float64),
        None if given.mask is None else np.array(given.mask, np.bool_),
        None if given.token_ids is None else np.array(given.token_ids, np.int64),
        given.weight_version,
        given.start,
    )
