"""`POST /score`: log-probabilities of given tokens, and their response as JSON.

Counterpart: `rollout_client/calls/async_client/info.py`.
"""

from typing import Any

import orjson
from fastapi import APIRouter, Request
from fastapi.responses import Response

from deployments.policy.failures import PolicyNotCurrent, PolicyUnknown
from deployments.protocols.generation import ScoredPrompt
from rollout_client.contract.info import ScoreRequest, ScoreResponse
from rollout_client.contract.rollouts import SampleError
from service.http.openapi import AuthorizedCaller, json_request, limited, needs, refusals
from service.http.request_body import read_body, refuse_other_than_json
from service.http.streaming import response_in_parts
from service.rollout_requests.result_encoding import JSON, document_in_parts, encode_beside_others
from service.routes.dependencies import Admitted, RequestId, Services
from service.scoring.scoring import Score


def _fields_of(score: ScoredPrompt | SampleError, start: int, top_k: int) -> dict[str, Any]:
    """The fields of a `SequenceScore`."""
    if isinstance(score, SampleError):
        return {"logprobs": None, "weight_version": None, "error": score.model_dump()}
    # Nothing comes before the first token.
    unknown = [] if start else [None]
    fields: dict[str, Any] = {"logprobs": unknown + list(score.prompt_logprobs), "weight_version": score.weight_version}
    if top_k:
        fields["top_token_ids"] = unknown + _rows(list(score.top_token_ids), top_k)
        fields["top_logprobs"] = unknown + _rows(list(score.top_logprobs), top_k)
    return fields


def _rows(values: list[Any], length: int) -> list[Any]:
    return [values[begin : begin + length] for begin in range(0, len(values), length)]


router = APIRouter(tags=["score"])


@router.post(
    "/score",
    response_model=ScoreResponse,
    **needs("rollout"),
    summary="Score given tokens",
    responses={429: limited(), **refusals(PolicyNotCurrent, PolicyUnknown, reads_body=True)},
    openapi_extra=json_request(ScoreRequest(sequences=[[5, 17, 8, 31, 9, 2]], start=3)),
)
async def _score(
    request: Request, services: Services, admitted: Admitted, request_id: RequestId, caller: AuthorizedCaller
) -> Response:
    """The log-probability of each token of the given sequences under the current weights.

    They are those of temperature 1, without top-p, top-k and min-p. A sequence that failed has an `error` among the
    others. Sequences share the engines with generations, and are computed anew: a prefix cache holds no
    log-probabilities. Nothing is kept, so an `Idempotency-Key` is ignored.
    """
    rollouts, scoring = services.rollouts, services.scoring
    refuse_other_than_json(request.headers)
    body = await read_body(request, rollouts.limits.max_body_bytes, hold=admitted.hold_body)
    parsed = await rollouts.body_parser.parse_score_request(body, scoring.bounds)
    admitted.hold_sequences(len(parsed.sequences), parsed.tokens)
    del body
    top_k, encoded = parsed.top_k, dict[int, bytes]()

    async def encode(position: int, score: Score) -> None:
        """Encodes each score as soon as it is there, so that little work is left after the last one."""
        start = parsed.starts[position]
        size = (len(parsed.sequences[position]) - start) * (1 + top_k)
        encoded[position] = await encode_beside_others(size, lambda: orjson.dumps(_fields_of(score, start, top_k)))

    policy = await scoring.score(parsed, request_id, encode, caller)
    summary = orjson.dumps({"request_id": request_id, "policy": policy.model_dump()})
    scores = (score for _, score in sorted(encoded.items()))
    return await response_in_parts(document_in_parts(summary, b"scores", scores), JSON)
