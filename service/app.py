"""The app builder that a Serve config names: `import_path: service.app:build`. Here the deployments are wired."""

from pathlib import Path
from typing import Any

from ray import serve
from ray.serve import Application

from deployments.agents.environment import HOST_GRACE_S, RUNS_OF_TASK
from deployments.agents.settings import AgentSettings, agent_deployment
from deployments.data.store import DataStore
from deployments.environments.host import EnvironmentHost
from deployments.generation.card_share import with_share_of_card
from deployments.generation.generator_replica import GeneratorReplica
from deployments.generation.settings import EngineSettings
from deployments.images.store import ImagesReplica
from deployments.jobs.store import JobStore
from deployments.models.reward_replica import RewardModelReplica
from deployments.models.settings import RewardModelSettings
from deployments.policy.store import PolicyStore
from deployments.rollout_records.store import RolloutRecordStore
from deployments.rpc.named_replica_router import NAMED_REPLICA_ROUTING
from deployments.sessions.store import SessionStore
from service.access.access_control import refuse_exposed
from service.ingress import Ingress, http_options
from service.settings import ServiceSettings

REPOSITORY = Path(__file__).resolve().parent.parent
UNREACHED_MAX_ONGOING_REQUESTS = 100_000
"""Serve's callers back off exponentially once a replica has `max_ongoing_requests`: it must never be reached."""
HEALTH_CHECK_PERIOD_S = 5.0
HEALTH_CHECK_TIMEOUT_S = 10.0
"""Serve replaces a replica after three checks in a row that failed or had no answer in time. A replica's event loop may
stall for seconds; one that hangs is replaced after 45 s."""


def build(settings: ServiceSettings) -> Application:
    """Wires the deployments: `Ingress` calls `Generator` and one environment deployment named after each task.

    `Ingress` and `Generator` ask `Policy`, which has one replica, for the current version of the weights. `Data` exists
    if a task has data. `Jobs`, which has one replica too, keeps what must outlive an ingress replica; `Sessions`, too,
    the records of agents, `Images` the images of prompts and observations, and `Records` the records of rollouts. Each
    reward model has a deployment that environments call, and each task's agent one that runs it.

    Raises:
        CardTooSmall: as `with_share_of_card`.
        ServiceExposed: strangers could use the service, as Serve listens, or read what it sends.
    """
    if (listening := http_options()) is not None:
        # Before an engine is loaded: an ingress replica, which looks again, starts after them.
        refuse_exposed(settings.access, listening)
    engine = with_share_of_card(with_absolute_paths(settings.engine))
    settings = settings.model_copy(update={"engine": engine})
    options = settings.ray_actor_options()
    policy_store = deployment(PolicyStore, "Policy", options).bind(
        settings.policy,
        engine.model,
        engine.hub.revision,
        max_lora_rank=engine.highest_rank,
        draft=engine.draft_model,
    )
    replicas = deployment(engine.replica or GeneratorReplica, "Generator", options).options(
        request_router_config=NAMED_REPLICA_ROUTING
    )

    def bound(store: type, name: str, stored: object | None) -> Application | None:
        return deployment(store, name, options).bind(stored) if stored else None

    sessions = bound(SessionStore, "Sessions", settings.sessions)
    images = bound(ImagesReplica, "Images", settings.images)
    generator = replicas.bind(engine, policy_store, settings.responses, sessions, settings.metrics, images)
    reward_models = {
        name: deployment(RewardModelReplica, name, options).bind(_with_absolute_path(model))
        for name, model in settings.reward_models.items()
    }
    environments = {
        task_name: deployment(EnvironmentHost, task_name, options)
        .options(request_router_config=NAMED_REPLICA_ROUTING)
        .bind(
            task_name,
            environment.import_path,
            environment.arguments,
            settings.limits.step_timeout_s,
            environment.models,
            {name: reward_models[name] for name in environment.reward_models},
            images,
            settings.images,
            environment.user_simulator,
            environment.certificate and str(REPOSITORY / Path(environment.certificate).expanduser()),
        )
        for task_name, environment in settings.environments.items()
    }
    ingress = deployment(Ingress, "Ingress", options)
    access = settings.access
    if access.keys_file is not None:
        access = access.model_copy(update={"keys_file": str(REPOSITORY / Path(access.keys_file).expanduser())})
    resolved = settings.model_copy(update={"access": access})
    agents = {task_name: _agent_host(task_name, agent, options) for task_name, agent in settings.agents_by_task.items()}
    return ingress.bind(
        resolved,
        generator=generator,
        policy_store=policy_store,
        environments=environments,
        agents=agents,
        data=bound(DataStore, "Data", settings.data_by_task),
        jobs=bound(JobStore, "Jobs", settings.jobs),
        sessions=sessions,
        images=images,
        records=bound(RolloutRecordStore, "Records", settings.rollout_records),
    )


def _agent_host(task_name: str, agent: AgentSettings, options: dict[str, dict[str, float]]) -> Application:
    name = agent_deployment(task_name)
    host = deployment(EnvironmentHost, name, options).options(request_router_config=NAMED_REPLICA_ROUTING)
    # A sandbox that is ready waits until the runs before it have ended.
    waits_s = 0.0 if agent.harbor is None else agent.timeout_s
    return host.bind(name, RUNS_OF_TASK, {"settings": agent}, waits_s + agent.timeout_s + HOST_GRACE_S)


def deployment(replica: type, name: str, ray_actor_options: dict[str, dict[str, float]]) -> serve.Deployment:
    """A deployment of `replica`; `ray_actor_options` has the options of every deployment, by name."""
    as_deployment = serve.deployment(
        name=name,
        max_ongoing_requests=UNREACHED_MAX_ONGOING_REQUESTS,
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        health_check_timeout_s=HEALTH_CHECK_TIMEOUT_S,
        ray_actor_options=ray_actor_options[name],
    )
    return as_deployment(replica)


def with_absolute_paths(engine: EngineSettings) -> EngineSettings:
    """Resolves folders against the repository's root: replicas run in working directories of their own."""
    tokenizer = None if engine.tokenizer is None else _in_repository(engine.tokenizer)
    resolved: dict[str, Any] = {"model": _in_repository(engine.model), "tokenizer": tokenizer}
    drafts = (engine.model_extra or {}).get("speculative_config") or {}
    if drafts.get("model"):
        resolved["speculative_config"] = {**drafts, "model": _in_repository(drafts["model"])}
    return engine.model_copy(update=resolved)


def _with_absolute_path(model: RewardModelSettings) -> RewardModelSettings:
    return model.model_copy(update={"model": _in_repository(model.model)})


def _in_repository(name: str) -> str:
    """The absolute path of a folder; the name of anything else."""
    folder = REPOSITORY / name
    return str(folder) if folder.is_dir() else name
