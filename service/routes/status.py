"""`GET /healthz` and `GET /readyz`."""

from typing import Literal

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict

from rollout_client.health_contract import Ready
from service.http.authorization import OPEN
from service.routes import descriptions
from service.routes.dependencies import Rollouts

router = APIRouter(tags=["health"])


class Alive(BaseModel):
    """The process answers."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    status: Literal["alive"] = "alive"
    """Always `alive`."""


@router.get("/healthz", **OPEN, **descriptions.HEALTHZ)
async def healthz() -> Alive:
    """Answers as long as the process does. Needs no other deployment."""
    return Alive()


@router.get("/readyz", **OPEN, **descriptions.READYZ)
async def readyz(rollouts: Rollouts) -> Ready:
    """Asks every replica of the generator and of the environments. 503 if no rollout would work; it says why."""
    return Ready(degraded=await rollouts.readiness.check())
