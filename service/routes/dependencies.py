"""Dependencies of the routes: the parts of the ingress, the request's id, and what the request holds in flight."""

from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from fastapi import Depends, Request

from deployments.images.failures import ImagesNotConfigured
from deployments.rollout_records.failures import records_not_configured
from deployments.sessions.failures import SessionsNotConfigured
from rollout_client.contract.problems import FieldProblem
from service.access.access_control import AccessControl
from service.access.keys import Caller
from service.admission.admission import AdmittedRequest
from service.agents.sessions import AgentSessions
from service.http.authorization import AuthorizedCaller
from service.http.middlewares import request_id_of
from service.http.request_body import stated_length
from service.images.request_images import RequestImages
from service.jobs.runner import JobRunner
from service.jobs.submission import required
from service.model_server.calls import ModelCalls
from service.model_server.tinker_sampling import TinkerSampling
from service.replay.replayer import Replayer
from service.rollout_records.recorder import RolloutRecorder
from service.rollout_records.trainer_reports import TrainerReports
from service.rollout_requests.rollout_service import RolloutService
from service.rollout_requests.service_status import Readiness
from service.scoring.scoring import Scoring

if TYPE_CHECKING:
    from deployments.policy.store import PolicyStore


@dataclass(frozen=True, slots=True, kw_only=True)
class AppServices:
    """The parts of one ingress replica that its routes call. `app.state.services` holds them."""

    rollouts: RolloutService
    access: AccessControl
    readiness: Readiness
    scoring: Scoring
    replayer: Replayer
    calls: ModelCalls
    tinker: TinkerSampling
    jobs: JobRunner | None = None
    """`None` if the service keeps no jobs."""
    sessions: AgentSessions | None = None
    """`None` if it keeps none."""
    images: RequestImages | None = None
    """`None` if it takes none."""
    records: RolloutRecorder | None = None
    """`None` if it keeps no records of rollouts."""
    reports: TrainerReports | None = None
    """`None` if `records` is."""


# Asynchronous, although they wait for nothing: FastAPI runs other functions in a thread.


async def app_services(request: Request) -> AppServices:
    services: AppServices = request.app.state.services
    return services


Services = Annotated[AppServices, Depends(app_services)]


async def rollout_service(services: Services) -> RolloutService:
    return services.rollouts


async def policy_store(services: Services) -> "PolicyStore":
    return services.rollouts.policy.store


async def optional_jobs(services: Services) -> JobRunner | None:
    return services.jobs


async def configured_jobs(services: Services) -> JobRunner:
    """Raises `JobsNotConfigured`."""
    return required(services.jobs)


async def model_calls(services: Services) -> ModelCalls:
    return services.calls


async def tinker_sampling(services: Services) -> TinkerSampling:
    return services.tinker


async def configured_sessions(services: Services) -> AgentSessions:
    """Raises `SessionsNotConfigured`."""
    if services.sessions is None:
        message = "the config has no `sessions`; add `sessions: {}`"
        raise SessionsNotConfigured(FieldProblem(field="sessions", message=message))
    return services.sessions


async def configured_images(services: Services) -> RequestImages:
    """Raises `ImagesNotConfigured`."""
    if services.images is None:
        message = "the config has no `images`; serve a model that takes them, and add `images: {}`"
        raise ImagesNotConfigured(FieldProblem(field="images", message=message))
    return services.images


async def configured_records(services: Services) -> RolloutRecorder:
    """Raises `RolloutRecordsNotConfigured`."""
    if services.records is None:
        raise records_not_configured()
    return services.records


async def configured_reports(
    services: Services, _: Annotated[RolloutRecorder, Depends(configured_records)]
) -> TrainerReports:
    """Raises `RolloutRecordsNotConfigured`."""
    assert services.reports is not None
    return services.reports


async def request_id(request: Request) -> str:
    return request_id_of(request)


async def admitted(request: Request, caller: AuthorizedCaller) -> AsyncGenerator[AdmittedRequest]:
    """See `held_request`. FastAPI resumes this when the response has been sent or broke."""
    with held_request(request, caller) as held:
        yield held


@contextmanager
def held_request(request: Request, caller: Caller, is_of_rollout: bool = False) -> Iterator[AdmittedRequest]:
    """Admits a request before its body is read, and frees what it holds when the block ends.

    Raises:
        RequestProblem: 429 or 413, the request is not admitted.
    """
    rollouts = request.app.state.services.rollouts
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
TinkerCalls = Annotated[TinkerSampling, Depends(tinker_sampling)]
Sessions = Annotated[AgentSessions, Depends(configured_sessions)]
Images = Annotated[RequestImages, Depends(configured_images)]
Records = Annotated[RolloutRecorder, Depends(configured_records)]
Reports = Annotated[TrainerReports, Depends(configured_reports)]
RequestId = Annotated[str, Depends(request_id)]
