"""The ingress deployment: serves HTTP and plays rollouts over the other deployments. Needs no GPU."""

from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from deployments import logs
from deployments.policy.store_client import PolicyStoreClient
from service.canary.background_canary import BackgroundCanary
from service.garbage import collect_small_portions
from service.remote.data import RemoteData
from service.remote.environment import RemoteEnvironment
from service.remote.generator import RemoteGenerator
from service.remote.policy import RemotePolicy
from service.rollout_service import RolloutService
from service.routes.http_app import build_http_app
from service.settings import ServiceSettings


@serve.ingress()
class Ingress:
    """Starts when the generator has started: every request that reaches it can be played."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        settings: ServiceSettings,
        generator: DeploymentHandle[Any],
        environments: dict[str, DeploymentHandle[Any]],
        policy_store: DeploymentHandle[Any],
        data: DeploymentHandle[Any] | None = None,
    ) -> None:
        logs.configure()
        policy = RemotePolicy(PolicyStoreClient(policy_store))
        policy.follow()
        remote = RemoteGenerator(generator, settings.scheduling.window_factor)
        if settings.canary.rate:
            remote.report_to(BackgroundCanary(settings.canary, remote).note)
        self._rollouts = await RolloutService.connect(
            settings,
            remote,
            {task_name: RemoteEnvironment(task_name, handle) for task_name, handle in environments.items()},
            policy,
            ingress_replicas,
            None if data is None else RemoteData(data),
        )
        collect_small_portions()

    def __serve_build_asgi_app__(self) -> FastAPI:
        # Serve's own server adds X-Request-ID to every response: a second one would make two values of it.
        return build_http_app(self._rollouts, sets_request_id_header=False)


def ingress_replicas() -> int:
    """How many ingress replicas the config asks for; with autoscaling, how many it asked for at the start."""
    return serve.get_replica_context().world_size or 1
