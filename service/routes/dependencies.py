"""What the routes get from the application: its service, and the id of the request."""

from typing import Annotated

from fastapi import Depends, FastAPI, Request

from deployments.policy.store_client import PolicyStoreClient
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


Rollouts = Annotated[RolloutService, Depends(rollout_service)]
Store = Annotated[PolicyStoreClient, Depends(policy_store)]
RequestId = Annotated[str, Depends(request_id)]
