"""`GET /healthz` and `GET /readyz`."""

from fastapi import APIRouter

from service.routes.dependencies import Rollouts

router = APIRouter(tags=["health"])


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    """The process is alive."""
    return {"status": "alive"}


@router.get("/readyz")
async def readyz(rollouts: Rollouts) -> dict[str, str]:
    """Rollouts can be served: the generator and all environments answer."""
    await rollouts.check_ready()
    return {"status": "ready"}
