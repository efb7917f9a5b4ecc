"""Dependencies of the routes: the parts of the ingress, the request's id, and what the request holds in flight."""

from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any, cast

from fastapi import Depends, Request

from deployments.images.book import ImagesNotConfigured
from deployments.policy.failures import TrainersNotConfigured
from deployments.rollout_records.book import records_not_configured
from deployments.sessions.records import SessionsNotConfigured
from service.access.keys import Caller
from service.admission.admission import AdmittedRequest
from service.agents.sessions import AgentSessions
from service.http.middlewares import request_id_of
from service.http.openapi import AuthorizedCaller
from service.http.request_body import stated_length
from service.images.request_images import RequestImages
from service.jobs.runner import JobRunner
from service.jobs.submission import required
from service.model_server.calls import ModelCalls
from service.model_server.tinker_sampling import TinkerSampling
from service.rollout_records.recorder import RolloutRecorder
from service.rollout_records.trainer_reports import TrainerReports
from service.rollout_requests.rollout_service import RolloutService
from service.services import AppServices
from service.settings import TrainersSettings

if TYPE_CHECKING:
    from deployments.policy.store import PolicyStore


async def _app_services(request: Request) -> AppServices:
    return cast(AppServices, request.app.state.services)


Services = Annotated[AppServices, Depends(_app_services)]


def _part(of: Callable[[AppServices], Any], missing: Callable[[], Exception] | None = None) -> Any:
    """The dependency on a part of the services. FastAPI would call `of` itself in a thread.

    Args:
        missing: makes the failure of a request that needs a part which the service does not have.
    """

    async def part(services: Services) -> Any:
        found = of(services)
        if found is None and missing is not None:
            raise missing()
        return found

    return Depends(part)


_NO_SESSIONS = partial(SessionsNotConfigured.of, "sessions", "the config has no `sessions`; add `sessions: {}`")
_NO_IMAGES = partial(
    ImagesNotConfigured.of, "images", "the config has no `images`; serve a model that takes them, and add `images: {}`"
)

_NO_TRAINERS = partial(TrainersNotConfigured.of, "trainers", "the config has no `trainers`; add `trainers: {}`")


async def _request_id(request: Request) -> str:
    return request_id_of(request)


async def _admitted(request: Request, caller: AuthorizedCaller) -> AsyncGenerator[AdmittedRequest]:
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


Rollouts = Annotated[RolloutService, _part(attrgetter("rollouts"))]
Admitted = Annotated[AdmittedRequest, Depends(_admitted)]
Store = Annotated["PolicyStore", _part(attrgetter("rollouts.policy.store"))]
Jobs = Annotated[JobRunner, _part(lambda services: required(services.jobs))]
OptionalJobs = Annotated[JobRunner | None, _part(attrgetter("jobs"))]
Calls = Annotated[ModelCalls, _part(attrgetter("calls"))]
TinkerCalls = Annotated[TinkerSampling, _part(attrgetter("tinker"))]
Sessions = Annotated[AgentSessions, _part(attrgetter("sessions"), _NO_SESSIONS)]
Images = Annotated[RequestImages, _part(attrgetter("images"), _NO_IMAGES)]
Records = Annotated[RolloutRecorder, _part(attrgetter("records"), records_not_configured)]
Reports = Annotated[TrainerReports, _part(attrgetter("reports"), records_not_configured)]
Trainers = Annotated[TrainersSettings, _part(attrgetter("trainers"), _NO_TRAINERS)]
RequestId = Annotated[str, Depends(_request_id)]
