"""The routes of `/sessions`: agents that bring their own loop, recorded exactly."""

import asyncio
from collections.abc import AsyncGenerator
from itertools import chain, islice
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Request
from fastapi.responses import Response

from deployments.policy.failures import PolicyNotCurrent, PolicyUnknown
from deployments.protocols.model_server import Endpoint
from deployments.sessions.records import (
    GenerationUnknown,
    JudgementFailed,
    OpenSession,
    SessionClosed,
    SessionLimitReached,
    SessionNotJudgeable,
    SessionsNotConfigured,
    SessionUnknown,
)
from rollout_client.contract.rollouts import Sampling
from rollout_client.contract.sessions import (
    DriftReport,
    SessionInfo,
    SessionList,
    SessionRequest,
    SessionReward,
    SessionSample,
    SessionSamples,
)
from service.access.keys import Caller
from service.admission.admission import AdmittedRequest
from service.http.openapi import (
    AuthorizedCaller,
    given_keys,
    json_request,
    limited,
    needs,
    refusal,
    refusals,
    with_session_key,
)
from service.http.request_body import read_json_body
from service.images.request_images import sample_with_names
from service.model_server.answers import response_to
from service.problems import MOST_PROBLEMS, invalid_request
from service.rollout_requests.result_encoding import JSON, json_of
from service.rollout_requests.validation import engine_problems, further_field_problems
from service.routes.dependencies import Calls, RequestId, Rollouts, Services, Sessions, held_request
from service.routes.model_server import CALL_ROUTES, MODELS, answer_call

_SessionId = Annotated[str, Path(description="The `id` that `POST /sessions` has answered.")]
router = APIRouter(prefix="/sessions", tags=["sessions"], responses=refusals(SessionsNotConfigured))
_UNKNOWN = refusals(SessionUnknown)
_MOST_BYTES_OF_A_REWARD = 2**16


@router.post(
    "",
    response_model=SessionInfo,
    **needs("rollout"),
    summary="Open a session",
    status_code=201,
    responses={
        201: {"description": "The session; see `base_url`"},
        429: refusal([SessionLimitReached.title]),
        **refusals(PolicyNotCurrent, PolicyUnknown, reads_body=True),
    },
    openapi_extra=json_request(SessionRequest(sampling=Sampling(temperature=1.0, max_new_tokens=256), deadline_s=600)),
)
async def _open_session(
    request: Request, rollouts: Rollouts, sessions: Sessions, services: Services, caller: AuthorizedCaller
) -> Response:
    """Gives a program an address that speaks OpenAI's and Anthropic's APIs, and a key of its own.

    Every call of the engine under it is recorded: prompt ids, generated ids, log-probabilities, weight versions.
    """
    asked = await read_json_body(request, SessionRequest, rollouts.limits.max_sample_bytes, "shorten the sample")
    problems = engine_problems(asked, rollouts.episode_factory.generator)
    if asked.sample is not None:
        problems = chain(problems, further_field_problems("sample", asked.sample, SessionSample))
    # In a thread: it looks at each value of the sample.
    if found := await asyncio.to_thread(list, islice(problems, MOST_PROBLEMS)):
        raise invalid_request(*found)
    if asked.sample is not None:
        # The session is stored: it has the names of images, not the images.
        named = await sample_with_names(services.images, asked.sample, caller)
        asked = asked.model_copy(update={"sample": named})
    info = await sessions.open(asked, caller, str(request.base_url))
    return Response(json_of(info), 201, {"Location": f"/v1/sessions/{info.id}"}, media_type=JSON)


@router.get("", response_model_exclude_unset=True, **needs("rollout"), summary="List the sessions")
async def _list_sessions(sessions: Sessions, caller: AuthorizedCaller) -> SessionList:
    """The sessions of the caller's key, oldest first."""
    return SessionList(sessions=await sessions.store.infos(caller.namespace))


@router.get(
    "/{session_id}",
    response_model_exclude_unset=True,
    **needs("rollout"),
    summary="Get the state of a session",
    responses=_UNKNOWN,
)
async def _session(session_id: _SessionId, sessions: Sessions, caller: AuthorizedCaller) -> SessionInfo:
    """State of the session."""
    return await sessions.store.info(session_id, caller.namespace)


@router.get(
    "/{session_id}/samples",
    response_model=SessionSamples,
    **needs("rollout"),
    summary="Get the branches of a session as rollouts",
    responses=_UNKNOWN,
)
async def _session_samples(session_id: _SessionId, sessions: Sessions, caller: AuthorizedCaller) -> Response:
    """The branches of the session as rollouts, with their rewards."""
    samples = await sessions.store.samples(session_id, caller.namespace)
    return Response(await asyncio.to_thread(json_of, samples), media_type=JSON)


@router.get(
    "/{session_id}/drift", **needs("rollout"), summary="Get what a session's program sent otherwise", responses=_UNKNOWN
)
async def _session_drift(session_id: _SessionId, sessions: Sessions, caller: AuthorizedCaller) -> DriftReport:
    """Where the program's texts differ from what was generated, and what was done about it."""
    return await sessions.store.drift(session_id, caller.namespace)


@router.post(
    "/{session_id}/reward",
    response_model=SessionInfo,
    **needs("rollout"),
    summary="Reward a session",
    responses=refusals(SessionUnknown, GenerationUnknown, SessionNotJudgeable, JudgementFailed, reads_body=True),
    openapi_extra=json_request(SessionReward(reward=1.0)),
)
async def _reward_session(
    request: Request, session_id: _SessionId, sessions: Sessions, caller: AuthorizedCaller, request_id: RequestId
) -> Response:
    """Rewards the session, or one of its generated messages and with it the branches that hold it.

    With `judge` the environment of the session's task computes the reward.
    """
    reward = await read_json_body(request, SessionReward, _MOST_BYTES_OF_A_REWARD, "send fewer parts")
    return Response(json_of(await sessions.reward(session_id, caller.namespace, reward, request_id)), media_type=JSON)


@router.delete(
    "/{session_id}", response_model_exclude_unset=True, **needs("rollout"), summary="End a session", responses=_UNKNOWN
)
async def _end_session(session_id: _SessionId, sessions: Sessions, caller: AuthorizedCaller) -> SessionInfo:
    """Ends the session: aborts calls in flight and refuses further ones. Its record stays readable until it expires."""
    return await sessions.store.end(session_id, caller.namespace)


async def _opened_session(request: Request, session_id: _SessionId, sessions: Sessions) -> OpenSession:
    """Checks the session's own key, before anything of a call is read."""
    return await sessions.authorized(session_id, given_keys(request))


Opened = Annotated[OpenSession, Depends(_opened_session)]


async def _admitted_call(
    request: Request, sessions: Sessions, opened: Opened
) -> AsyncGenerator[tuple[AdmittedRequest, Caller]]:
    """Admits the call on behalf of the caller who opened the session."""
    caller = await sessions.caller_of(opened)
    is_of_rollout = opened.share_id is not None
    with held_request(request, caller, is_of_rollout) as held:
        yield held, caller


_AdmittedCall = Annotated[tuple[AdmittedRequest, Caller], Depends(_admitted_call)]


def _recorded(call: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a route's decorator for the same call below a session, which refuses calls too."""
    given = call["responses"]
    own = refusals(SessionUnknown, SessionClosed)
    # A model server's own 404 is not a problem document.
    unknown = {**own[404], "content": {**own[404]["content"], **given.get(404, own[404])["content"]}}
    return with_session_key({**call, "responses": {**given, **own, 404: unknown, 429: limited(SessionLimitReached)}})


def _call_of(endpoint: Endpoint) -> Any:
    async def call(
        request: Request, services: Services, opened: Opened, admitted_call: _AdmittedCall, request_id: RequestId
    ) -> Response:
        admitted, caller = admitted_call
        return await answer_call(endpoint, request, services, admitted, request_id, caller, opened)

    return call


_NOT_IN_SESSIONS: tuple[Endpoint, ...] = ("completions", "detokenize")
"""A session's prompts are made of its own ids, so that it has no text completions, and is never echoed."""
for route in CALL_ROUTES:
    if route.endpoint not in _NOT_IN_SESSIONS:
        router.add_api_route(
            f"/{{session_id}}{route.path_in_session}",
            _call_of(route.endpoint),
            methods=["POST"],
            name=f"session_{route.name}",
            response_model=None,
            description=f"As `POST /v1/{route.endpoint}`, recorded. It takes the session's own key.",
            **_recorded(route.documented()),
        )


@router.get("/{session_id}/v1/models", name="session_models", response_model=None, **_recorded(MODELS))
async def _session_models(sessions: Sessions, opened: Opened, calls: Calls, request_id: RequestId) -> Response:
    """The model. A call of a session may name any."""
    answer = calls.answer("models", b"", request_id, await sessions.caller_of(opened), opened)
    return await response_to("models", answer, request_id)
