"""The call of `/score`: what it sends and how its response is read. No I/O."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic_core import to_json

from rollout_client.calls.options import CallOptions, without_call_options
from rollout_client.calls.rollouts import Call, as_given, parsed
from rollout_client.contract.rollouts import PolicyDemand
from rollout_client.contract.scores import ScoreResponse
from rollout_client.priority_contract import Priority


class ScoreOptions(CallOptions, total=False):
    """What a score takes beside its sequences. The service has a default for what is missing or `None`."""

    top_k: int | None
    """For each position, so many of the most likely tokens come back too."""
    start: int | Sequence[int] | None
    """The first position that is asked for; one number for all sequences, or one for each."""
    policy: PolicyDemand | Mapping[str, Any] | None
    """The weights that score."""
    priority: Priority | None
    """The share of the engines while other requests wait too: a name, or a number in proportion to `train`."""
    sequence_retries: int | None
    """How often the service repeats the scoring of one sequence after a failure of the fleet; the request's field
    `retries`. `retries` is the number of further attempts of the whole request, by the client."""


def score_call(sequences: Iterable[Iterable[int]], options: ScoreOptions) -> Call[ScoreResponse]:
    """Each sequence is a list of token ids, or a one-dimensional array or tensor of them."""

    def read(body: bytes) -> ScoreResponse:
        return parsed(ScoreResponse, "The response of POST /score", body)

    given = {name: as_given(value) for name, value in without_call_options(options).items() if value is not None}
    if "sequence_retries" in given:
        given["retries"] = given.pop("sequence_retries")
    body = to_json({"sequences": [list_of(sequence) for sequence in sequences], **given})
    return Call("POST", "/score", read, body=body)


def list_of(sequence: Any) -> list[int]:
    ids: list[int] = sequence.tolist() if hasattr(sequence, "tolist") else list(sequence)
    return ids
