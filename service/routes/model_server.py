"""The routes of a model server: OpenAI's, Anthropic's and vLLM's APIs, as vLLM answers them, and SGLang's."""

from dataclasses import dataclass
from typing import Annotated, Any
from uuid import uuid4

from fastapi import APIRouter, Query, Request
from fastapi.responses import PlainTextResponse, Response
from pydantic import JsonValue

from deployments.policy.failures import PolicyNotCurrent, PolicyUnknown
from deployments.protocols.generation import RequestShare
from deployments.protocols.model_server import TOKEN_ENDPOINTS, Endpoint
from deployments.sessions.records import OpenSession
from rollout_client.contract.base import PolicyDemand, PolicyName, Priority
from rollout_client.contract.info import Ready
from rollout_client.contract.sessions import ModelServerAnswer, ModelServerCall
from service.access.keys import Caller
from service.admission.admission import AdmittedRequest
from service.http.openapi import OPEN, AuthorizedCaller, content, json_request, limited, needs, refusals, schema_of
from service.http.request_body import JSON, read_body, read_json_body, refuse_other_than_json
from service.model_server.answers import response_to
from service.model_server.call_bodies import CHOICES_FIELD, asks_for_stream, choices_of, demand_of, fields_of
from service.model_server.call_images import with_names_of_images
from service.model_server.calls import ANY_WEIGHTS
from service.model_server.sglang import (
    AbortRequest,
    SGLangLoad,
    SGLangLoads,
    SGLangModelInfo,
    SGLangWorker,
    SGLangWorkers,
)
from service.routes.dependencies import Admitted, Calls, RequestId, Rollouts, Services
from service.scheduling.fair_queue import share_of
from service.services import AppServices

SHORTEN = "shorten the conversation"
_ROUTING_KEYS = ("x-smg-routing-key", "x-session-id")
"""Headers with which trainers say that calls share a prefix: for SGLang's router, and SkyRL's and prime-rl's."""
_ANSWER = content(schema_of(ModelServerAnswer))
_QUESTION: JsonValue = [{"role": "user", "content": "What is 2 + 2?"}]
router = APIRouter(tags=["model server"])


async def answer_call(
    endpoint: Endpoint,
    request: Request,
    services: AppServices,
    admitted: AdmittedRequest,
    request_id: str,
    caller: Caller,
    session: OpenSession | None = None,
    demand: PolicyDemand = ANY_WEIGHTS,
    share: RequestShare | None = None,
) -> Response:
    """Reads a call, which may be as large as a sample because one replica reads it at once, and has it answered.

    Args:
        session: the one that records the call; see `ModelCalls.answer` for the other arguments.
    """
    limits = services.rollouts.limits
    refuse_other_than_json(request.headers)
    most_bytes = min(limits.max_body_bytes, limits.max_sample_bytes)
    body = bytes(await read_body(request, most_bytes, SHORTEN, admitted.hold_body))
    fields = await fields_of(body)
    choices = choices_of(endpoint, fields, limits.max_rollouts_per_request)
    admitted.hold_call(choices, CHOICES_FIELD)
    routing_key = None
    if endpoint in TOKEN_ENDPOINTS:
        demand = demand_of(fields, demand, session is not None)
        if session is None:
            routing_key = next(filter(None, map(request.headers.get, _ROUTING_KEYS)), None)
    if session is None:
        demand = await services.calls.demand_of_model(fields.get("model"), demand)
    if session is not None or services.images is not None:
        body = await with_names_of_images(endpoint, body, fields, services.images, caller)
    answer = services.calls.answer(endpoint, body, request_id, caller, session, choices, demand, share, routing_key)
    return await response_to(endpoint, answer, request_id, asks_for_stream(fields))


MODELS: dict[str, Any] = {"summary": "List the model", "responses": {200: {"content": {JSON: _ANSWER}}}}


@router.get("/models", response_model=None, **needs("read", also_api_key=True), **MODELS)
async def _models(calls: Calls, request_id: RequestId, caller: AuthorizedCaller) -> Response:
    """The model, by the name that calls give in `model`, as OpenAI's clients read it."""
    return await response_to("models", calls.answer("models", b"", request_id, caller), request_id)


_Policy = Annotated[
    PolicyName | None, Query(description="The named policy that answers; by default the one without a name.")
]
_VERSION = "The version of the weights that make all of the answer; 409 if another takes its place."
_Version = Annotated[int | None, Query(ge=0, description=_VERSION)]
_PRIORITY = "The share of the engines: `train` by default for calls of token ids, `interactive` for others."


def _share_of(endpoint: Endpoint, priority: Priority | None, caller: Caller) -> RequestShare | None:
    if endpoint in TOKEN_ENDPOINTS:
        # A trainer makes a call for each sample: all of them are one party, as the rollouts of a request are.
        return share_of(f"tokens {priority or 'train'} {caller.name or ''}", priority or "train", caller)
    return None if priority is None else share_of(uuid4().hex, priority, caller)


@dataclass(frozen=True, slots=True)
class _CallRoute:
    """A route that answers calls of one endpoint of a model server: here, and below a session."""

    endpoint: Endpoint
    name: str
    summary: str
    description: str
    example: dict[str, JsonValue]

    @property
    def path_in_session(self) -> str:
        """Below the address of a session, from which each API's clients go on as they do from a server's own."""
        return f"/{self.endpoint}" if self.endpoint in TOKEN_ENDPOINTS else f"/v1/{self.endpoint}"

    def documented(self) -> dict[str, Any]:
        """Summary, responses and body, as arguments of a route's decorator."""
        events = {"text/event-stream": content({"type": "string"})}
        refused = refusals(reads_body=True)
        of_policy = refusals(PolicyNotCurrent, PolicyUnknown)
        return {
            "summary": self.summary,
            "responses": {
                200: {"description": "As vLLM's own server answers", "content": {JSON: _ANSWER, **events}},
                **refused,
                400: {**refused[400], "content": {**refused[400]["content"], JSON: _ANSWER}},
                404: {
                    "description": "Unknown model, or policy",
                    "content": {**of_policy[404]["content"], JSON: _ANSWER},
                },
                409: of_policy[409],
                429: limited(),
            },
            "openapi_extra": json_request(ModelServerCall.model_validate(self.example)),
        }


CALL_ROUTES = (
    _CallRoute(
        "chat/completions",
        "chat_completions",
        "Complete a chat",
        "OpenAI's chat completions. With `return_token_ids` the answer has the ids of prompt and response, and "
        "`weight_versions`: which weights made which tokens.",
        {"messages": _QUESTION, "max_tokens": 64, "return_token_ids": True},
    ),
    _CallRoute(
        "completions",
        "completions",
        "Complete a text",
        "OpenAI's text completions of texts or token ids. With `logprobs` or `return_token_ids` each choice has "
        "`weight_versions`; with `echo` log-probabilities of the prompt too, by the weights of its first token.",
        {"prompt": "What is 2 + 2?", "max_tokens": 1, "logprobs": 1, "echo": True},
    ),
    _CallRoute(
        "responses",
        "responses",
        "Create a response",
        "OpenAI's responses, without those that a server stores.",
        {"input": "What is 2 + 2?", "max_output_tokens": 64},
    ),
    _CallRoute(
        "messages",
        "messages",
        "Create a message",
        "Anthropic's messages, streaming included.",
        {"model": "any", "messages": _QUESTION, "max_tokens": 64},
    ),
    _CallRoute(
        "messages/count_tokens",
        "count_tokens",
        "Count the tokens of a prompt",
        "How many tokens the prompt of a message has.",
        {"model": "any", "messages": _QUESTION, "max_tokens": 64},
    ),
    _CallRoute(
        "tokenize",
        "tokenize",
        "Tokenize",
        "The token ids of a text, or of messages as the chat template renders them.",
        {"messages": _QUESTION},
    ),
    _CallRoute("detokenize", "detokenize", "Decode token ids", "The text of token ids.", {"tokens": [5, 6, 7]}),
    _CallRoute(
        "generate",
        "generate",
        "Generate from token ids or a text, as SGLang does",
        "SGLang's `/generate`. `weight_version` of the body says which weights may answer, `lora_path` which named "
        "policy. Log-probabilities are those of the distribution that was sampled from.",
        {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 64}, "return_logprob": True},
    ),
    _CallRoute(
        "inference/v1/generate",
        "generate_tokens",
        "Generate from token ids, as vLLM does",
        "vLLM's API of token ids. `weight_version` of the body says which weights may answer, as in `POST /generate`.",
        {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 64, "logprobs": 0}},
    ),
)


def _answers_calls_of(endpoint: Endpoint) -> Any:
    """The function of a route."""

    async def call(
        request: Request,
        services: Services,
        admitted: Admitted,
        request_id: RequestId,
        caller: AuthorizedCaller,
        policy: _Policy = None,
        version: _Version = None,
        priority: Annotated[Priority | None, Query(description=_PRIORITY)] = None,
    ) -> Response:
        demand, share = PolicyDemand(name=policy, version=version), _share_of(endpoint, priority, caller)
        return await answer_call(endpoint, request, services, admitted, request_id, caller, demand=demand, share=share)

    return call


for route in CALL_ROUTES:
    router.add_api_route(
        f"/{route.endpoint}",
        _answers_calls_of(route.endpoint),
        methods=["POST"],
        name=route.name,
        response_model=None,
        description=route.description,
        **needs("rollout", also_api_key=True),
        **route.documented(),
    )


MOST_BYTES_OF_AN_ABORT = 2**16
_NOTHING_FLUSHED = "Nothing was flushed: scores use no prefix cache, and new weights empty it.\n"


@router.post(
    "/abort_request",
    response_class=Response,
    **needs("rollout"),
    summary="Abort calls of SGLang's API",
    responses={200: {"description": "They have ended"}, **refusals(reads_body=True)},
    openapi_extra=json_request(AbortRequest(abort_all=True)),
)
async def _abort_request(request: Request, calls: Calls, caller: AuthorizedCaller) -> Response:
    """Ends calls of `POST /generate` with the tokens that they have; calls that wait for their turn end without any."""
    asked = await read_json_body(request, AbortRequest, MOST_BYTES_OF_AN_ABORT, "name fewer calls")
    await calls.abort(asked.rid or "", caller)
    return Response()


@router.get("/get_model_info", name="get_model_info", **needs("read"), summary="Describe the model, as SGLang did")
@router.get("/model_info", **needs("read"), summary="Describe the model, as SGLang does")
async def _model_info(rollouts: Rollouts) -> SGLangModelInfo:
    """The model and the current version of its weights."""
    name, version = rollouts.episode_factory.generator.model, rollouts.policy.version or 0
    return SGLangModelInfo(model_path=name, tokenizer_path=name, weight_version=str(version))


@router.get("/workers", **needs("read"), summary="List the workers, as SGLang's router does")
async def _workers(request: Request) -> SGLangWorkers:
    """One worker: the service, by the address at which it was reached."""
    return SGLangWorkers(workers=[SGLangWorker(url=str(request.base_url).rstrip("/"))])


@router.get("/loads", **needs("read"), summary="Count the calls in flight, as SGLang does")
async def _loads(calls: Calls, caller: AuthorizedCaller) -> SGLangLoads:
    """The calls of token ids of the caller's key."""
    return SGLangLoads(loads=[SGLangLoad(num_running_reqs=calls.token_calls_of(caller))])


@router.get(
    "/health_generate",
    name="health_generate",
    **OPEN,
    summary="Check that calls can be served, as SGLang does by generating",
)
@router.get("/health", **OPEN, summary="Check that calls can be served, as SGLang does")
async def _health(services: Services) -> Ready:
    """As `GET /readyz`."""
    return Ready(degraded=await services.readiness.check())


@router.post(
    "/flush_cache",
    response_class=PlainTextResponse,
    **needs("rollout"),
    summary="Do nothing, where SGLang flushes its cache",
)
async def _flush_cache() -> Response:
    """Trainers call it before they let prompts be scored, which uses no cache here."""
    return PlainTextResponse(_NOTHING_FLUSHED)
