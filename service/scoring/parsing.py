"""Parses the body of `POST /score`: from untrusted bytes to sequences that the engines can score.

Guarantee: at most one problem of the sequences is built, whatever the body holds; what comes out is within the bounds.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from deployments.protocols.generation import packed_ids
from rollout_client.contract.base import PolicyDemand, Priority
from rollout_client.contract.problems import FieldProblem
from rollout_client.contract.scores import ScoreRequest
from service.problems import invalid_request, unknown_token, validation_problem

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
    try:
        request = ScoreRequest.model_validate_json(body, strict=True)
    except ValidationError as error:
        raise validation_problem(error) from error
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


def joined_score_request(first: ParsedScoreRequest, sequences: Iterable["array[int]"]) -> ParsedScoreRequest:
    """The request of its `score_request_parts`."""
    return replace(first, sequences=[*sequences])
