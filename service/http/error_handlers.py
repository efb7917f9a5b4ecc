"""Turns everything that a route can raise into a problem document with the id of its request."""

import logging
from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match, Route

from deployments.failures import RolloutFailure, StoreFailure
from rollout_client.contract.problems import Problem
from service.http.middlewares import problem_response, request_id_headers_of, request_id_of
from service.problems import RequestProblem, field_problem, internal_error, invalid_request, not_ready, problem_of

RETRY_AFTER_S = 2
CLIENT_CLOSED_REQUEST = 499
"""Nginx's status for this case. Nobody reads it."""
logger = logging.getLogger("rollout_service.routes")


def install_error_handlers(app: FastAPI) -> None:
    app.exception_handler(RequestProblem)(on_problem)
    app.exception_handler(StoreFailure)(on_problem)
    app.exception_handler(RequestValidationError)(on_invalid_parameters)
    app.exception_handler(RolloutFailure)(on_rollout_failure)
    app.exception_handler(HTTPException)(on_http_exception)
    app.exception_handler(ClientDisconnect)(on_client_disconnect)
    app.exception_handler(Exception)(on_unexpected_error)


async def on_problem(request: Request, error: RequestProblem | StoreFailure) -> Response:
    problem = problem_of(error)
    return problem_response(problem.problem, request_id_of(request), problem.headers)


async def on_invalid_parameters(request: Request, error: RequestValidationError) -> Response:
    problem = invalid_request(*(field_problem(finding) for finding in error.errors())).problem
    return problem_response(problem, request_id_of(request))


async def on_rollout_failure(request: Request, failure: RolloutFailure) -> Response:
    request_id = request_id_of(request)
    logger.warning("A deployment does not answer.", exc_info=failure, extra={"request_id": request_id})
    return problem_response(not_ready(str(failure)).problem, request_id, {"Retry-After": str(RETRY_AFTER_S)})


async def on_http_exception(request: Request, error: HTTPException) -> Response:
    problem = Problem(
        type="about:blank",
        title=str(error.detail),
        status=error.status_code,
        detail=f"{request.method} {request.url.path}: {error.detail}. The routes are listed at /docs.",
    )
    headers = dict(error.headers or {})
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        headers["Allow"] = ", ".join(allowed_methods(request))
    return problem_response(problem, request_id_of(request), headers)


async def on_client_disconnect(_request: Request, _error: ClientDisconnect) -> Response:
    """The client went away before its body had arrived."""
    return Response(status_code=CLIENT_CLOSED_REQUEST)


def allowed_methods(request: Request) -> list[str]:
    """Those of all routes with the path of the request; Starlette names those of the first one alone."""
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    matching = [route for route in routes if route.matches(request.scope)[0] is not Match.NONE]
    return sorted({method for route in matching for method in route.methods or ()})


async def on_unexpected_error(request: Request, error: Exception) -> Response:
    request_id = request_id_of(request)
    log_unexpected_error(error, request_id)
    # Starlette sends this response outside of all middleware, which would have set the header.
    return problem_response(internal_error(error).problem, request_id, request_id_headers_of(request))


def log_unexpected_error(error: Exception, request_id: str) -> None:
    logger.error("A request failed unexpectedly.", exc_info=error, extra={"request_id": request_id})
