"""What the routes get from the application: its service, the request's id, and what the request holds in flight."""

from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import Depends, FastAPI, Request

from deployments.policy.store_client import PolicyStoreClient
from service.admission.admission import AdmittedRequest
from service.rollout_service import RolloutService
from service.routes.request_ids import request_id_of


def provide(app: FastAPI, rollouts: RolloutService) -> None:
    """Makes `rollouts` the service of all routes of `app`."""
    app.state.rollouts = rollouts


# Asynchronous, although they wait for nothing: FastAPI runs other functions in a thread.


async def rollout_service(request: Request) -> RolloutService:
    rollouts: RolloutService = request.app.state.rollouts
    return rollouts


async def policy_store(request: Request) -> PolicyStoreClient:
    return (await rollout_service(request)).policy.store


async def request_id(request: Request) -> str:
    return request_id_of(request)


async def admitted_request(request: Request) -> AsyncIterator[AdmittedRequest]:
    """Admits a `POST /rollout` or `/score` before its body is read.

    FastAPI resumes this when the response has been sent or broke.

    Raises:
        RequestProblem: 429 or 413, the request is not admitted.
    """
    rollouts = await rollout_service(request)
    # A body over the limit is refused by its reader, with that limit.
    body_bytes = min(int(request.headers.get("content-length", 0)), rollouts.limits.max_body_bytes)
    with rollouts.collections.request_in_flight(), rollouts.admission.admitted(body_bytes) as admitted:
        yield admitted


Rollouts = Annotated[RolloutService, Depends(rollout_service)]
Admitted = Annotated[AdmittedRequest, Depends(admitted_request)]
Store = Annotated[PolicyStoreClient, Depends(policy_store)]
RequestId = Annotated[str, Depends(request_id)]
