"""The app builder that a Serve config names: `import_path: service.app:build`."""

from collections.abc import Mapping
from pathlib import Path

from ray import serve
from ray.serve import Application

from deployments.environments.host import EnvironmentHost
from deployments.generation.generator_replica import GeneratorReplica
from deployments.policy.store import PolicyStore
from deployments.rpc.named_replica_router import NAMED_REPLICA_ROUTING
from deployments.simulation.settings import SimulatedEngineSettings
from deployments.simulation.simulated_generator_replica import SimulatedGeneratorReplica
from service.ingress import Ingress
from service.settings import AnyEngineSettings, ServiceSettings

REPOSITORY = Path(__file__).resolve().parent.parent
NEVER_THE_LIMIT = 100_000
"""Past `max_ongoing_requests` Serve's callers back off exponentially: it must never be what limits."""
HEALTH_CHECK_PERIOD_S = 5.0
NO_OPTIONS: Mapping[str, float] = {}
POLICY_OPTIONS = {"num_cpus": 0.1}


def build(settings: ServiceSettings) -> Application:
    """Wires the deployments: `Ingress` calls `Generator` and one environment deployment named after each task.

    Both ask `Policy`, of which there is one replica, what the weights are.
    """
    engine = with_absolute_model_path(settings.engine)
    policy_store = deployment(PolicyStore, "Policy", POLICY_OPTIONS).bind(settings.policy, engine.model)
    replica = SimulatedGeneratorReplica if isinstance(engine, SimulatedEngineSettings) else GeneratorReplica
    replicas = deployment(replica, "Generator", engine.ray_actor_options()).options(
        request_router_config=NAMED_REPLICA_ROUTING
    )
    generator = replicas.bind(engine, policy_store)
    environments = {
        task_name: deployment(EnvironmentHost, task_name).bind(
            task_name, environment.import_path, environment.arguments
        )
        for task_name, environment in settings.environments.items()
    }
    ingress = deployment(Ingress, "Ingress")
    return ingress.bind(settings.model_copy(update={"engine": engine}), generator, environments, policy_store)


def deployment(replica: type, name: str, ray_actor_options: Mapping[str, float] = NO_OPTIONS) -> serve.Deployment:
    as_deployment = serve.deployment(
        name=name,
        max_ongoing_requests=NEVER_THE_LIMIT,
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        ray_actor_options=dict(ray_actor_options),
    )
    return as_deployment(replica)


def with_absolute_model_path(engine: AnyEngineSettings) -> AnyEngineSettings:
    """Replicas run in folders of their own; a path relative to the repository must still be found."""
    relative_to_repository = REPOSITORY / engine.model
    if not relative_to_repository.is_dir():
        return engine
    return engine.model_copy(update={"model": str(relative_to_repository)})
