"""The HTTP face, put together: routers, problem documents, the OpenAPI page."""

from fastapi import FastAPI

from service.responses.problems import install_problem_handlers
from service.rollout_service import RolloutService
from service.routes.health import health_routes
from service.routes.openapi import describe_request_body
from service.routes.policy import policy_routes
from service.routes.rollout import rollout_routes
from service.routes.tasks import task_routes


def build_http_app(rollouts: RolloutService) -> FastAPI:
    app = FastAPI(title="Rollouts", description="The current policy plays prompts against environments.")
    install_problem_handlers(app)
    describe_request_body(app)
    app.include_router(rollout_routes(rollouts))
    app.include_router(task_routes(rollouts))
    app.include_router(health_routes(rollouts))
    app.include_router(policy_routes(rollouts.policy.store))
    return app
