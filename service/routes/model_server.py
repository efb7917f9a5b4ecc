"""The routes of a model server: OpenAI's and Anthropic's APIs, as vLLM's own servers answer them."""

from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response

from deployments.protocols.model_server import Endpoint
from service.access.keys import Caller
from service.admission.admission import AdmittedRequest
from service.http.authorization import AuthorizedCaller, needs_of_client
from service.http.request_body import read_body, refuse_other_than_json
from service.model_server.answers import response_to
from service.model_server.call_bodies import choices_of, refuse_lone_surrogates
from service.model_server.calls import ModelCalls
from service.rollout_requests.rollout_service import RolloutService
from service.routes import descriptions
from service.routes.dependencies import Admitted, Calls, RequestId, Rollouts

SHORTEN = "shorten the conversation"
router = APIRouter(tags=["model server"])


async def read_call(
    endpoint: Endpoint, request: Request, rollouts: RolloutService, admitted: AdmittedRequest
) -> tuple[bytes, int]:
    """The body of a call, and the choices that it asks for.

    A call may be as large as a sample: one replica reads it at once.
    """
    refuse_other_than_json(request.headers)
    most_bytes = min(rollouts.limits.max_body_bytes, rollouts.limits.max_sample_bytes)
    body = await read_body(request, most_bytes, SHORTEN, admitted.hold_body)
    call = bytes(body)
    refuse_lone_surrogates(call)
    choices = choices_of(endpoint, call, rollouts.limits.max_rollouts_per_request)
    admitted.hold_call(choices)
    return call, choices


@dataclass(frozen=True, slots=True)
class ModelCall:
    """A call of these routes, admitted for its caller."""

    request: Request
    rollouts: RolloutService
    calls: ModelCalls
    admitted: AdmittedRequest
    request_id: str
    caller: Caller

    async def answered(self, endpoint: Endpoint) -> Response:
        body, choices = await read_call(endpoint, self.request, self.rollouts, self.admitted)
        answer = self.calls.answer(endpoint, body, self.request_id, self.caller, choices=choices)
        return await response_to(endpoint, body, answer, self.request_id)


async def model_call(
    request: Request,
    rollouts: Rollouts,
    calls: Calls,
    admitted: Admitted,
    request_id: RequestId,
    caller: AuthorizedCaller,
) -> ModelCall:
    # Not the class itself: FastAPI makes an instance of one in a thread.
    return ModelCall(request, rollouts, calls, admitted, request_id, caller)


Call = Annotated[ModelCall, Depends(model_call)]


@router.get("/models", response_model=None, **needs_of_client("read"), **descriptions.MODELS)
async def models(calls: Calls, request_id: RequestId, caller: AuthorizedCaller) -> Response:
    """The model, by the name that calls give in `model`, as OpenAI's clients read it."""
    return await response_to("models", b"", calls.answer("models", b"", request_id, caller), request_id)


@router.post("/chat/completions", response_model=None, **needs_of_client("rollout"), **descriptions.CHAT_COMPLETIONS)
async def chat_completions(call: Call) -> Response:
    """OpenAI's chat completions: text, tools, JSON schemas, log-probabilities; `stream: true` for server-sent events.

    With `return_token_ids` the answer has the ids of prompt and response, and `weight_versions`: which weights made
    which tokens.
    """
    return await call.answered("chat/completions")


@router.post("/responses", response_model=None, **needs_of_client("rollout"), **descriptions.RESPONSES)
async def responses(call: Call) -> Response:
    """OpenAI's responses, without those that a server stores."""
    return await call.answered("responses")


@router.post("/messages", response_model=None, **needs_of_client("rollout"), **descriptions.MESSAGES)
async def messages(call: Call) -> Response:
    """Anthropic's messages, streaming included."""
    return await call.answered("messages")


@router.post("/messages/count_tokens", response_model=None, **needs_of_client("rollout"), **descriptions.COUNT_TOKENS)
async def count_tokens(call: Call) -> Response:
    """How many tokens the prompt of a message has."""
    return await call.answered("messages/count_tokens")


@router.post("/tokenize", response_model=None, **needs_of_client("rollout"), **descriptions.TOKENIZE)
async def tokenize(call: Call) -> Response:
    """The token ids of a text, or of messages as the chat template renders them."""
    return await call.answered("tokenize")


@router.post("/detokenize", response_model=None, **needs_of_client("rollout"), **descriptions.DETOKENIZE)
async def detokenize(call: Call) -> Response:
    """The text of token ids."""
    return await call.answered("detokenize")
