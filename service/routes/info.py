"""`GET /info`: what the service is. Counterpart in the client: `rollout_client/async_client/info.py`."""

import orjson
from fastapi import APIRouter
from fastapi.responses import Response

from rollout_client.info_contract import ServiceInfo, Vocabulary
from service.http.authorization import needs
from service.requests.media_types import JSON
from service.routes import descriptions
from service.routes.dependencies import Rollouts

router = APIRouter(prefix="/info", tags=["info"])


@router.get("", **needs("read"), **descriptions.INFO)
async def info(rollouts: Rollouts) -> ServiceInfo:
    """Model, tokenizer, limits, versions and tasks: what a client or a trainer has to match."""
    return rollouts.info()


@router.get("/vocabulary", response_model=Vocabulary, **needs("read"), **descriptions.VOCABULARY)
async def vocabulary(rollouts: Rollouts) -> Response:
    """The token of each id, to see which differ where `vocabulary_sha256` is not what a trainer has."""
    # A vocabulary has hundreds of thousands of tokens: orjson encodes them in milliseconds.
    return Response(orjson.dumps({"tokens": rollouts.vocabulary}), media_type=JSON)
