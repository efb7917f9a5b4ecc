"""`GET /healthz` and `GET /readyz`."""

from fastapi import APIRouter

from service.rollout_service import RolloutService


def health_routes(rollouts: RolloutService) -> APIRouter:
    routes = APIRouter()

    @routes.get("/healthz")
    async def healthz() -> dict[str, str]:
        """This process is alive."""
        return {"status": "alive"}

    @routes.get("/readyz")
    async def readyz() -> dict[str, str]:
        """Rollouts can be served: generator and environments answer."""
        await rollouts.check_ready()
        return {"status": "ready"}

    return routes
