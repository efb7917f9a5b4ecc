"""The ingress deployment: serves HTTP and plays rollouts over the other deployments. Needs no GPU.

Where Serve listens is asked of Serve itself, whoever started it: `serve run` reads no config of ours.
"""

import asyncio
from collections.abc import Iterable
from typing import Any, cast

import ray
from fastapi import FastAPI
from ray import serve

from deployments import logs
from deployments.chat.tokenizer_loading import leave_torch_out
from deployments.protocols.generation import Environment
from deployments.rpc.handle_calls import policy_store_client
from deployments.upstream.ray_serve.direct_ingress import HttpOptions, listen_on_own_port, running_http_options
from deployments.upstream.ray_serve.own_replica import call_at_shutdown, install
from deployments.upstream.ray_serve.proxy_handles import keep_proxy_handles
from service.access.access_control import refuse_exposed
from service.http.middlewares import ServeRequests, request_pacer
from service.metrics.ingress_metrics import HttpMetrics, HttpMetricsMiddleware, IngressGauges, export
from service.metrics.rollout_metrics import RolloutMetrics
from service.remote.generator import RemoteGenerator
from service.remote.policy import RemotePolicy
from service.rollout_requests.episodes import version_of
from service.rollout_requests.garbage_collection import freeze_and_tune_collector
from service.rollouts.progress import UNOBSERVED, RolloutObserver
from service.routes.http_app import build_http_app
from service.services import Handle, Handles, build_services
from service.settings import ServiceSettings
from service.tracing.spans import TracedRollouts, TracingMiddleware, tracer_of

listen_on_own_port()  # Serve loads this module before it makes the replica, whose metrics depend on who listens.


def http_options() -> HttpOptions | None:
    """Options of the running Serve; `None` where none runs. Blocks."""
    if not ray.is_initialized():
        return None
    return cast(HttpOptions | None, running_http_options())


@serve.ingress()
class Ingress:
    """Starts when the generator has started: every request that reaches it can be played."""

    async def __init__(self, settings: ServiceSettings, **handles: Any) -> None:  # type: ignore[misc]  # Serve awaits it
        """Makes all parts; `handles` are the fields of `Handles`."""
        logs.configure()
        install()
        leave_torch_out()
        options = await asyncio.to_thread(http_options)
        assert options is not None
        refuse_exposed(settings.access, options)
        others = Handles(**handles)
        metrics = RolloutMetrics() if settings.metrics else None
        self._http_metrics = None if metrics is None else HttpMetrics()
        observer: RolloutObserver = metrics or UNOBSERVED
        self._tracer = None
        if settings.tracing is not None:
            replica_id = serve.get_replica_context().replica_tag
            self._tracer = tracer_of(settings.tracing, replica_id, version_of("rollout-service"))
            observer = TracedRollouts(self._tracer, observer, settings.tracing.rollouts_per_request)
        generator = _generator(settings, others.generator, metrics)
        store, follows_folder = policy_store_client(others.policy_store), settings.policy.follow is not None
        policy = RemotePolicy(store, follows_folder, generator.note_rolling)
        self._watching = asyncio.create_task(policy.run())
        self._services = services = await build_services(settings, others, generator, policy, observer, options)
        await asyncio.to_thread(services.rollouts.body_parser.start)
        if services.jobs is not None:
            call_at_shutdown(services.jobs.hand_over)
        self._describing = asyncio.create_task(_describe_tasks(services.rollouts.environments.values()))
        if metrics is not None and self._http_metrics is not None:
            gauges = IngressGauges(services.rollouts.admission, generator, policy)
            self._exporting = export(metrics, self._http_metrics, gauges)
        self._request_pacer = request_pacer()
        keep_proxy_handles(self._request_pacer.wait_for_turn)
        freeze_and_tune_collector()

    async def drain(self, bound_s: float) -> int:
        """Called before the whole service is shut down, while all other deployments still serve; see `Admission.drain`.

        Caller: `service/startup/local_service.py`.
        """
        return await self._services.rollouts.admission.drain(bound_s)

    def __serve_build_asgi_app__(self) -> FastAPI:
        # Serve's own server adds X-Request-ID to every response: a second one would make two values of it.
        app = build_http_app(self._services, sets_request_id_header=False)
        if self._http_metrics is not None:
            app.add_middleware(HttpMetricsMiddleware, metrics=self._http_metrics)
        if self._tracer is not None:
            app.add_middleware(TracingMiddleware, tracer=self._tracer)
        app.add_middleware(ServeRequests, pacer=self._request_pacer)
        return app


def _generator(settings: ServiceSettings, handle: Handle, metrics: RolloutMetrics | None) -> RemoteGenerator:
    scheduling, observer = settings.scheduling, metrics or UNOBSERVED
    return RemoteGenerator(handle, scheduling.window_factor, scheduling.idle_program_s, observer)


async def _describe_tasks(tasks: Iterable[Environment]) -> None:
    """Asks each environment for its description, which took 50 ms of the first rollout. Judges of sessions need it too.

    An environment that does not answer is asked again by the first request with its task.
    """
    await asyncio.gather(*(task.known_description() for task in tasks), return_exceptions=True)
