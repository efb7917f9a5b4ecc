"""The ingress deployment: serves HTTP and plays rollouts over the other deployments. Needs no GPU.

Where Serve listens is asked of Serve itself, whoever started it: `serve run` reads no config of ours.
"""

import asyncio
from functools import partial
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from deployments import logs
from deployments.agents.settings import agent_deployment
from deployments.rpc.store_client import job_store_client, policy_store_client
from deployments.sessions.store_client import session_store_client
from deployments.simulation.timing import SimulatedEngineSettings
from deployments.upstream.ray_serve.grpc_wakeups import read_all_wakeups
from deployments.upstream.ray_serve.own_replica import call_at_shutdown, most_replicas
from service.access.access_control import AccessControl
from service.access.exposure import HttpOptions, refuse_exposed
from service.agents.runs import AgentRuns
from service.agents.session_judge import SessionJudge
from service.agents.sessions import AgentSessions
from service.canary.background_canary import BackgroundCanary
from service.http.proxy_handles import keep_proxy_handles
from service.http.serve_requests import ServeRequests, request_pacer
from service.jobs.runner import JobRunner
from service.metrics.ingress_metrics import HttpMetricsMiddleware, Look, ServiceMetrics
from service.model_server.calls import ModelCalls
from service.remote.data import RemoteData
from service.remote.environment import RemoteEnvironment
from service.remote.generator import RemoteGenerator
from service.remote.policy import RemotePolicy
from service.rollout_requests.garbage_collection import collect_small_portions
from service.rollout_requests.rollout_service import RolloutService
from service.rollout_requests.service_status import version_of
from service.rollouts.progress import UNOBSERVED
from service.routes.http_app import build_http_app
from service.scheduling.priority import counts_by_priority
from service.settings import ServiceSettings
from service.tracing.spans import TracedRollouts, TracingMiddleware
from service.tracing.tracer import tracer_of

ALL_INTERFACES = (None, "0.0.0.0", "::", "")


def http_options() -> HttpOptions | None:
    """Of the Serve that runs; `None` where none does. Blocks."""
    if not ray.is_initialized():
        return None
    # Serve has no public way to its own options.
    client = serve.context._get_global_client(raise_if_no_controller_running=False)
    return None if client is None else client.http_config


def own_address(options: HttpOptions) -> str:
    """Under which programs reach the service on a node where Serve has a proxy."""
    scheme = "http" if options.ssl_certfile is None else "https"
    host = "127.0.0.1" if options.host in ALL_INTERFACES else options.host
    return f"{scheme}://{host}:{options.port}"


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
        jobs: DeploymentHandle[Any] | None = None,
        sessions: DeploymentHandle[Any] | None = None,
        agents: dict[str, DeploymentHandle[Any]] | None = None,
    ) -> None:
        logs.configure()
        read_all_wakeups()
        options = await asyncio.to_thread(http_options)
        assert options is not None
        refuse_exposed(settings.access, options)
        self._access = AccessControl.of(settings.access, options.host)
        policy = RemotePolicy(policy_store_client(policy_store))
        policy.follow()
        remote = RemoteGenerator(generator, settings.scheduling.window_factor)
        self._metrics = ServiceMetrics() if settings.metrics else None
        if settings.canary.rate:
            remote.report_to(BackgroundCanary(settings.canary, remote).note)
        observer = UNOBSERVED if self._metrics is None else self._metrics.rollouts
        self._tracer = None
        if settings.tracing is not None:
            self._tracer = tracer_of(
                settings.tracing, serve.get_replica_context().replica_tag, version_of("rollout-service")
            )
            observer = TracedRollouts(self._tracer, observer, settings.tracing.rollouts_per_request)
        self._rollouts = await RolloutService.connect(
            settings,
            remote,
            {task_name: RemoteEnvironment(task_name, handle) for task_name, handle in environments.items()},
            policy,
            most_replicas,
            None if data is None else RemoteData(data),
            observer,
        )
        if self._metrics is not None:
            remote.report_waits_to(partial(self._metrics.rollouts.took, "queue"))
            self._metrics.follow(partial(look_at, self._rollouts, remote))
        self._calls: ModelCalls | None = None
        if not isinstance(settings.engine, SimulatedEngineSettings):
            self._calls = ModelCalls(remote, self._rollouts.admission, settings.limits.generation_timeout_s)
        self._sessions: AgentSessions | None = None
        if sessions is not None and settings.sessions is not None and self._calls is not None:
            store, base_url = session_store_client(sessions), settings.sessions.base_url
            self._rollouts.readiness.also_ask("sessions", store.answer)
            judge = SessionJudge(self._rollouts.environments)
            self._sessions = AgentSessions(store, self._calls, policy, self._access, judge, base_url)
        if self._sessions is not None and agents:
            programs = {name: RemoteEnvironment(agent_deployment(name), handle) for name, handle in agents.items()}
            self._rollouts.use_agents(AgentRuns(self._sessions, programs, own_address(options)))
        self._jobs: JobRunner | None = None
        if jobs is not None and settings.jobs is not None:
            self._jobs = JobRunner(job_store_client(jobs), self._rollouts, self._access, settings.jobs.max_body_bytes)
            self._jobs.follow()
            self._rollouts.readiness.also_ask("jobs", self._jobs.store.answer)
            call_at_shutdown(self._jobs.hand_over)
        self._request_pacer = request_pacer()
        keep_proxy_handles(self._request_pacer)
        collect_small_portions()

    async def drain(self, bound_s: float) -> int:
        """Called before the whole service is shut down, while all other deployments still serve; see `Admission.drain`.

        Caller: `service/startup/local_service.py`.
        """
        return await self._rollouts.admission.drain(bound_s)

    def __serve_build_asgi_app__(self) -> FastAPI:
        # Serve's own server adds X-Request-ID to every response: a second one would make two values of it.
        app = build_http_app(
            self._rollouts,
            self._access,
            sets_request_id_header=False,
            job_runner=self._jobs,
            calls=self._calls,
            agent_sessions=self._sessions,
        )
        if self._metrics is not None:
            app.add_middleware(HttpMetricsMiddleware, metrics=self._metrics.http)
        if self._tracer is not None:
            app.add_middleware(TracingMiddleware, tracer=self._tracer)
        app.add_middleware(ServeRequests, pacer=self._request_pacer)
        return app


def look_at(rollouts: RolloutService, generator: RemoteGenerator) -> Look:
    """What the gauges of an ingress replica show."""
    held = rollouts.admission.in_flight
    return Look(
        rollouts=held.rollouts,
        requested_tokens=held.tokens,
        body_bytes=held.body_bytes,
        waiting_generations=generator.waiting_generations,
        waiting_by_priority=counts_by_priority(generator.waiting_by_weight),
        policy_versions=rollouts.policy.known_versions,
    )
