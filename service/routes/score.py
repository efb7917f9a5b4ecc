"""`POST /score`: log-probabilities of given tokens. Counterpart: `rollout_client/async_client/score.py`."""

from functools import partial

from fastapi import APIRouter, Request
from fastapi.responses import Response

from rollout_client.score_contract import ScoreResponse
from service.http.authorization import AuthorizedCaller, needs
from service.http.request_body import read_body
from service.requests.media_types import refuse_other_than_json
from service.responses.parts import response_in_parts
from service.responses.score_encoder import ScoreEncoder
from service.rollout_requests.result_encoding import encode_beside_others
from service.routes import descriptions
from service.routes.dependencies import Admitted, RequestId, Rollouts
from service.scoring.scoring import Score

router = APIRouter(tags=["score"])


@router.post("/score", response_model=ScoreResponse, **needs("rollout"), **descriptions.SCORE)
async def score(
    request: Request, rollouts: Rollouts, admitted: Admitted, request_id: RequestId, caller: AuthorizedCaller
) -> Response:
    """The log-probability of each token of the given sequences under the current weights.

    They are those of temperature 1, without top-p, top-k and min-p. A sequence that failed has an `error` among the
    others. Sequences share the engines with generations, and are computed anew: a prefix cache holds no
    log-probabilities. Nothing is kept, so an `Idempotency-Key` is ignored.
    """
    refuse_other_than_json(request.headers)
    body = await read_body(request, rollouts.limits.max_body_bytes, hold=admitted.hold_body)
    parsed = await rollouts.body_parser.parse_score_request(body, rollouts.scoring.bounds)
    admitted.hold_sequences(len(parsed.sequences), parsed.tokens)
    del body
    top_k = parsed.options.top_k
    encoder = ScoreEncoder(top_k)

    async def encode(position: int, score: Score) -> None:
        sequence = parsed.sequences[position]
        size = (len(sequence.token_ids) - sequence.start) * (1 + top_k)
        await encode_beside_others(size, partial(encoder.add, position, sequence.start, score))

    policy = await rollouts.scoring.score(parsed, request_id, encode, caller)
    return await response_in_parts(encoder.body(request_id, policy), encoder.media_type)
