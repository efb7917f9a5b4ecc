"""What the routes get from the application: its service, the request's id, and what the request holds in flight."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated

from fastapi import Depends, FastAPI, Request

from deployments.sessions.failures import SessionsNotConfigured
from rollout_client.contract.problems import FieldProblem
from service.access.access_control import AccessControl
from service.access.keys import Caller
from service.admission.admission import AdmittedRequest
from service.agents.sessions import AgentSessions
from service.http.authorization import AuthorizedCaller
from service.http.request_body import stated_length
from service.http.request_ids import request_id_of
from service.jobs.runner import JobRunner
from service.jobs.submission import required
from service.model_server.calls import ModelCalls
from service.problems import no_model_server
from service.rollout_requests.rollout_service import RolloutService

if TYPE_CHECKING:
    from deployments.policy.store import PolicyStore


def provide(
    app: FastAPI,
    rollouts: RolloutService,
    access: AccessControl,
    jobs: JobRunner | None = None,
    calls: ModelCalls | None = None,
    sessions: AgentSessions | None = None,
) -> None:
    """Makes `rollouts` the service of all routes of `app`, for the callers that `access` lets in.

    Args:
        jobs: `None` for a service that keeps no jobs.
        calls: `None` for a service without engines that answer calls of model servers' APIs.
        sessions: `None` for a service that keeps none.
    """
    app.state.rollouts = rollouts
    app.state.access = access
    app.state.jobs = jobs
    app.state.calls = calls
    app.state.sessions = sessions


# Asynchronous, although they wait for nothing: FastAPI runs other functions in a thread.


async def rollout_service(request: Request) -> RolloutService:
    rollouts: RolloutService = request.app.state.rollouts
    return rollouts


async def policy_store(request: Request) -> "PolicyStore":
    return (await rollout_service(request)).policy.store


async def optional_jobs(request: Request) -> JobRunner | None:
    jobs: JobRunner | None = request.app.state.jobs
    return jobs


async def configured_jobs(request: Request) -> JobRunner:
    """Raises `JobsNotConfigured`."""
    return required(await optional_jobs(request))


async def model_calls(request: Request) -> ModelCalls:
    """Raises `RequestProblem` (501)."""
    calls: ModelCalls | None = request.app.state.calls
    if calls is None:
        raise no_model_server()
    return calls


async def configured_sessions(request: Request) -> AgentSessions:
    """Raises `SessionsNotConfigured`."""
    sessions: AgentSessions | None = request.app.state.sessions
    if sessions is None:
        message = "the config has no `sessions`; add `sessions: {}`"
        raise SessionsNotConfigured(FieldProblem(field="sessions", message=message))
    return sessions


async def request_id(request: Request) -> str:
    return request_id_of(request)


async def admitted(request: Request, caller: AuthorizedCaller) -> AsyncGenerator[AdmittedRequest]:
    """See `admitted_request`."""
    async with aclosing(admitted_request(request, caller)) as admitting:
        async for one in admitting:
            yield one


async def admitted_request(
    request: Request, caller: Caller, is_of_rollout: bool = False
) -> AsyncGenerator[AdmittedRequest]:
    """Admits a `POST /rollout` or `/score` before its body is read.

    FastAPI resumes this when the response has been sent or broke.

    Raises:
        RequestProblem: 429 or 413, the request is not admitted.
    """
    rollouts = await rollout_service(request)
    # A body over the limit is refused by its reader, with that limit.
    stated_bytes = min(stated_length(request.headers), rollouts.limits.max_body_bytes)
    admission = rollouts.admission
    with rollouts.collections.request_in_flight(), admission.admitted(0, caller, stated_bytes, is_of_rollout) as held:
        yield held


Rollouts = Annotated[RolloutService, Depends(rollout_service)]
Admitted = Annotated[AdmittedRequest, Depends(admitted)]
Store = Annotated["PolicyStore", Depends(policy_store)]
Jobs = Annotated[JobRunner, Depends(configured_jobs)]
OptionalJobs = Annotated[JobRunner | None, Depends(optional_jobs)]
Calls = Annotated[ModelCalls, Depends(model_calls)]
Sessions = Annotated[AgentSessions, Depends(configured_sessions)]
RequestId = Annotated[str, Depends(request_id)]
