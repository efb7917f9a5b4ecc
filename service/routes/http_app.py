"""The HTTP application: all routers, under `/v1` and without it, with request ids and problem documents."""

from fastapi import FastAPI
from fastapi.routing import APIRoute

from service.http.middlewares import RequestMiddleware, install_error_handlers
from service.http.openapi import complete_document, refusals
from service.routes import (
    blobs,
    jobs,
    model_server,
    policy,
    rollout,
    rollout_records,
    score,
    sessions,
    status,
    tinker,
    trainers,
)
from service.services import AppServices
from service.ui import routes as ui

ROUTERS = (
    rollout.router,
    rollout_records.router,
    rollout_records.unprefixed_router,
    jobs.router,
    score.router,
    blobs.router,
    model_server.router,
    sessions.router,
    status.tasks_router,
    status.info_router,
    policy.router,
    status.router,
    status.metrics_router,
    ui.router,
)
TITLE = "Rollout service"
API_VERSION = "1"
DESCRIPTION = """Plays prompts against environments with the current policy, for reinforcement learning.

- Every path also exists without the prefix `/v1`, with the same meaning.
- Every response has the header `X-Request-ID`, which every log line about it has too: the caller's own, or a new one.
- A response with status 429 or 503 has the header `Retry-After`: seconds to wait before trying again.
- Every response has the header `X-Rollout-Contract`: the version of these types.
- Where the service asks for keys, a request carries `Authorization: Bearer KEY`, and the key has the route's scope.
- An error of a whole request is a problem document (RFC 9457, `application/problem+json`) that names the field, its
  value and what to do. A failed rollout is data: a sample with `status: error` among the others.
"""


def build_http_app(services: AppServices, sets_request_id_header: bool = True) -> FastAPI:
    """Builds the application. The routes under `/v1` are documented; those without the prefix are their aliases.

    Args:
        sets_request_id_header: whether responses get `X-Request-ID` here; false behind a server that adds it itself.
    """
    app = FastAPI(
        title=TITLE,
        version=API_VERSION,
        description=DESCRIPTION,
        generate_unique_id_function=_operation_id,
        separate_input_output_schemas=False,
    )
    app.state.services = services
    install_error_handlers(app)
    app.add_middleware(RequestMiddleware, sets_id_header=sets_request_id_header)
    for router in ROUTERS:
        app.include_router(router, prefix="/v1", responses=refusals())
        app.include_router(router, include_in_schema=False)
    # Their paths, with versions or without, are those that the clients of Tinker and of vLLM call.
    app.include_router(tinker.router)
    app.include_router(trainers.router)
    complete_document(app)
    return app


def _operation_id(route: APIRoute) -> str:
    return route.name.lstrip("_")
