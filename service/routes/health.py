"""`GET /healthz` and `GET /readyz`."""

from typing import Literal

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict

from service.routes import descriptions
from service.routes.dependencies import Rollouts

router = APIRouter(tags=["health"])


class Alive(BaseModel):
    """The process answers."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    status: Literal["alive"] = "alive"
    """Always `alive`."""


class Ready(BaseModel):
    """Rollouts can be served."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    status: Literal["ready"] = "ready"
    """Always `ready`; a service that is not ready answers 503."""


@router.get("/healthz", **descriptions.HEALTHZ)
async def healthz() -> Alive:
    """Answers as long as the process does. Needs no other deployment."""
    return Alive()


@router.get("/readyz", **descriptions.READYZ)
async def readyz(rollouts: Rollouts) -> Ready:
    """Asks the generator and every environment; responds with 503 and names the first that does not answer."""
    await rollouts.check_ready()
    return Ready()
