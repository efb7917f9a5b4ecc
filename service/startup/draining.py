"""Lets the rollouts under way end before a whole service is shut down. Server half: `Ingress.drain`."""

from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import DeploymentUnavailableError, RayServeException
from ray.serve.schema import DeploymentSchema, ServeApplicationSchema, ServeDeploySchema
from rich.console import Console
from tenacity import retry, retry_if_exception_type, stop_after_delay, wait_fixed

from service.startup.config import APP_BUILDER
from service.startup.console_logs import stages_shown

INGRESS = "Ingress"
GRACEFUL_SHUTDOWN_TIMEOUT_S = 20.0
"""Ray Serve's, where a config says nothing."""
LONGEST_ANSWER_S = 5.0
"""Of an ingress replica that says what is left."""
REPLICAS_KNOWN_WITHIN_S = 10.0
REPLICAS_KNOWN_POLL_S = 0.05


def finish_rollouts(config: ServeDeploySchema, console: Console) -> None:
    """Has the ingress refuse new requests, and waits for those under way as long as its `graceful_shutdown_timeout_s`.

    Serve shuts all deployments of an application down at once: without this, an ingress replica would go on with
    rollouts for which there are no engines and environments any more.
    """
    for application in config.applications:
        if application.import_path == APP_BUILDER:
            finish_rollouts_of(application, console)


def finish_rollouts_of(application: ServeApplicationSchema, console: Console) -> None:
    bound_s = shutdown_bound_s(application)
    try:
        handle: Any = serve.get_deployment_handle(INGRESS, app_name=application.name)
        # This process has no event loop for the handle, and may have the environment of `serve.env`, which says that
        # handles use their caller's.
        handle._init(_run_router_in_separate_loop=True)
        with stages_shown(console) as show:
            show(f"Finishing the rollouts under way, for at most {bound_s:g} s")
            left = drain_replicas(handle, bound_s)
    except (RayError, RayServeException, TimeoutError) as error:
        console.print(f"The rollouts under way could not be waited for: {error}", markup=False, soft_wrap=True)
        return
    if left:
        console.print(f"{left} rollouts have not ended within {bound_s:g} s.")


@retry(
    retry=retry_if_exception_type(DeploymentUnavailableError),
    stop=stop_after_delay(REPLICAS_KNOWN_WITHIN_S),
    wait=wait_fixed(REPLICAS_KNOWN_POLL_S),
    reraise=True,
)
def drain_replicas(handle: Any, bound_s: float) -> int:
    """How many rollouts are left on all replicas of the ingress.

    Ray Serve 2.60 tells a new handle its deployment's config and its replicas in two messages. Between them
    `broadcast` finds no replica and calls the deployment unavailable.
    """
    answers: list[int] = handle.broadcast("drain", bound_s).results(timeout_s=bound_s + LONGEST_ANSWER_S)
    return sum(answers)


def shutdown_bound_s(application: ServeApplicationSchema) -> float:
    """`graceful_shutdown_timeout_s` of the ingress, in seconds."""
    ingress = next((each for each in application.deployments if each.name == INGRESS), DeploymentSchema(name=INGRESS))
    given = ingress.graceful_shutdown_timeout_s
    return float(given) if isinstance(given, int | float) else GRACEFUL_SHUTDOWN_TIMEOUT_S
