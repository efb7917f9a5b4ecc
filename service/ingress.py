"""The ingress deployment: HTTP in, rollouts over the other deployments, processors only."""

import gc
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from deployments import logs
from deployments.policy.store_client import PolicyStoreClient
from service.remote.environment import RemoteEnvironment
from service.remote.generator import RemoteGenerator
from service.remote.policy import RemotePolicy
from service.rollout_service import RolloutService
from service.routes.http_app import build_http_app
from service.settings import ServiceSettings

GARBAGE_AFTER_OBJECTS = 50_000
"""The collector looks when so many are new. By default it does after 700, and with thousands of samples in flight it
then spends most of the time on looking at what lives as long as they do."""


@serve.ingress()
class Ingress:
    """Ready when its generator is: a request that it takes can be played."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        settings: ServiceSettings,
        generator: DeploymentHandle[Any],
        environments: dict[str, DeploymentHandle[Any]],
        policy_store: DeploymentHandle[Any],
    ) -> None:
        logs.configure()
        gc.set_threshold(GARBAGE_AFTER_OBJECTS)
        policy = RemotePolicy(PolicyStoreClient(policy_store))
        policy.follow()
        self._rollouts = await RolloutService.connect(
            settings,
            RemoteGenerator(generator),
            {task_name: RemoteEnvironment(task_name, handle) for task_name, handle in environments.items()},
            policy,
        )

    def __serve_build_asgi_app__(self) -> FastAPI:
        return build_http_app(self._rollouts)
