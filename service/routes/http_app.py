"""The HTTP application: all routers, under `/v1` and without it, with request ids and problem documents."""

from fastapi import FastAPI
from fastapi.routing import APIRoute

from service.rollout_service import RolloutService
from service.routes import health, policy, rollout, tasks
from service.routes.dependencies import provide
from service.routes.error_handlers import install_error_handlers
from service.routes.openapi import describe_request_body
from service.routes.request_ids import RequestIdMiddleware

ROUTERS = (rollout.router, tasks.router, policy.router, health.router)


def build_http_app(rollouts: RolloutService, sets_request_id_header: bool = True) -> FastAPI:
    """Builds the application. The routes under `/v1` are documented; those without the prefix are their aliases.

    Args:
        sets_request_id_header: whether responses get `X-Request-ID` here; false behind a server that adds it itself.
    """
    app = FastAPI(
        title="Rollouts",
        description="The current policy plays prompts against environments.",
        generate_unique_id_function=operation_id,
    )
    provide(app, rollouts)
    install_error_handlers(app)
    app.add_middleware(RequestIdMiddleware, sets_header=sets_request_id_header)
    describe_request_body(app)
    for router in ROUTERS:
        app.include_router(router, prefix="/v1")
        app.include_router(router, include_in_schema=False)
    return app


def operation_id(route: APIRoute) -> str:
    return route.name
