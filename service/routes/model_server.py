"""The routes of a model server: OpenAI's and Anthropic's APIs, as vLLM's own servers answer them."""

from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import Response
from pydantic import JsonValue

from deployments.policy.failures import PolicyNotCurrent, PolicyUnknown
from deployments.protocols.model_server import GENERATED, Endpoint
from rollout_client.contract.base import PolicyDemand, PolicyName
from rollout_client.contract.sessions import ModelServerAnswer, ModelServerCall
from service.admission.admission import AdmittedRequest
from service.http.authorization import AuthorizedCaller, needs
from service.http.openapi import content, json_content, json_request, json_response, limited, refusal, refusals
from service.http.request_body import JSON, read_body, refuse_other_than_json
from service.model_server.answers import response_to
from service.model_server.call_bodies import CHOICES_FIELD, CHOICES_FIELDS, choices_of, refuse_lone_surrogates
from service.model_server.call_images import with_names_of_images
from service.model_server.calls import ANY_WEIGHTS
from service.problems import NO_MODEL_SERVER
from service.rollout_requests.rollout_service import RolloutService
from service.routes.dependencies import Admitted, Calls, RequestId, Rollouts, Services

SHORTEN = "shorten the conversation"
MODEL_SERVER_ANSWER = ModelServerAnswer.model_validate(
    {"id": "chatcmpl-1f0c", "object": "chat.completion", "model": "models/tiny"}
)
MODEL_SERVER_ERROR = ModelServerAnswer.model_validate(
    {"error": {"message": "Unknown.", "type": "BadRequestError", "code": 400}}
)
QUESTION: JsonValue = [{"role": "user", "content": "What is 2 + 2?"}]
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
    admitted.hold_call(choices, CHOICES_FIELDS.get(endpoint, CHOICES_FIELD))
    return call, choices


MODELS: dict[str, Any] = {
    "summary": "List the model",
    "responses": {200: json_response(MODEL_SERVER_ANSWER), **refusals(), 501: refusal([NO_MODEL_SERVER.title])},
}


@router.get("/models", response_model=None, **needs("read", also_api_key=True), **MODELS)
async def models(calls: Calls, request_id: RequestId, caller: AuthorizedCaller) -> Response:
    """The model, by the name that calls give in `model`, as OpenAI's clients read it."""
    return await response_to("models", b"", calls.answer("models", b"", request_id, caller), request_id)


async def demanded(
    policy: Annotated[
        PolicyName | None, Query(description="The named policy that answers; by default the one without a name.")
    ] = None,
    version: Annotated[
        int | None,
        Query(
            ge=0, description="The version of the weights that make all of the answer; 409 if another takes its place."
        ),
    ] = None,
) -> PolicyDemand:
    return PolicyDemand(name=policy, version=version)


async def nothing_demanded() -> PolicyDemand:
    return ANY_WEIGHTS


@dataclass(frozen=True, slots=True)
class CallRoute:
    """A route that answers calls of one endpoint of a model server: here, and below a session."""

    endpoint: Endpoint
    name: str
    summary: str
    description: str
    example: dict[str, JsonValue]

    def documented(self) -> dict[str, Any]:
        """Summary, responses and body, as arguments of a route's decorator."""
        error = json_content(MODEL_SERVER_ERROR)
        events = {"text/event-stream": content({"type": "string"})}
        refused = refusals(reads_body=True)
        of_policy = refusals(PolicyNotCurrent, PolicyUnknown) if self.endpoint in GENERATED else {}
        unknown = of_policy.get(404, {"content": {}})["content"]
        return {
            "summary": self.summary,
            "responses": {
                200: {
                    "description": "As vLLM's own server answers",
                    "content": {JSON: json_content(MODEL_SERVER_ANSWER), **events},
                },
                **refused,
                400: {**refused[400], "content": {**refused[400]["content"], JSON: error}},
                404: {"description": "The model is not known, or the policy", "content": {**unknown, JSON: error}},
                **({409: of_policy[409]} if of_policy else {}),
                429: limited(),
                501: refusal([NO_MODEL_SERVER.title]),
            },
            "openapi_extra": json_request(ModelServerCall.model_validate(self.example)),
        }


CALL_ROUTES = (
    CallRoute(
        "chat/completions",
        "chat_completions",
        "Complete a chat",
        "OpenAI's chat completions: text, tools, JSON schemas, log-probabilities; `stream: true` for server-sent "
        "events.\n\nWith `return_token_ids` the answer has the ids of prompt and response, and `weight_versions`: "
        "which weights made which tokens.",
        {"messages": QUESTION, "max_tokens": 64, "return_token_ids": True},
    ),
    CallRoute(
        "completions",
        "completions",
        "Complete a text",
        "OpenAI's text completions of texts or token ids, several at once in a list. With `echo` and `logprobs` the "
        "answer has the log-probabilities of the prompt too, as evaluation harnesses ask for them.\n\nWith `logprobs` "
        "or `return_token_ids` each choice has `weight_versions`: which weights made which of its generated tokens. "
        "Those of the first one computed the whole prompt.",
        {"prompt": "What is 2 + 2?", "max_tokens": 1, "logprobs": 1, "echo": True},
    ),
    CallRoute(
        "responses",
        "responses",
        "Create a response",
        "OpenAI's responses, without those that a server stores.",
        {"input": "What is 2 + 2?", "max_output_tokens": 64},
    ),
    CallRoute(
        "messages",
        "messages",
        "Create a message",
        "Anthropic's messages, streaming included.",
        {"model": "any", "messages": QUESTION, "max_tokens": 64},
    ),
    CallRoute(
        "messages/count_tokens",
        "count_tokens",
        "Count the tokens of a prompt",
        "How many tokens the prompt of a message has.",
        {"model": "any", "messages": QUESTION, "max_tokens": 64},
    ),
    CallRoute(
        "tokenize",
        "tokenize",
        "Tokenize",
        "The token ids of a text, or of messages as the chat template renders them.",
        {"messages": QUESTION},
    ),
    CallRoute("detokenize", "detokenize", "Decode token ids", "The text of token ids.", {"tokens": [5, 6, 7]}),
)


def answers_calls_of(endpoint: Endpoint) -> Any:
    """The function of a route."""

    async def call(
        request: Request,
        rollouts: Rollouts,
        calls: Calls,
        services: Services,
        admitted: Admitted,
        request_id: RequestId,
        caller: AuthorizedCaller,
        demand: Annotated[PolicyDemand, Depends(demanded if endpoint in GENERATED else nothing_demanded)],
    ) -> Response:
        body, choices = await read_call(endpoint, request, rollouts, admitted)
        if services.images is not None:
            body = await with_names_of_images(endpoint, body, services.images, caller)
        await rollouts.policy.wait_for_version(demand)
        answer = calls.answer(endpoint, body, request_id, caller, choices=choices, demand=demand)
        return await response_to(endpoint, body, answer, request_id)

    return call


for route in CALL_ROUTES:
    router.add_api_route(
        f"/{route.endpoint}",
        answers_calls_of(route.endpoint),
        methods=["POST"],
        name=route.name,
        response_model=None,
        description=route.description,
        **needs("rollout", also_api_key=True),
        **route.documented(),
    )
