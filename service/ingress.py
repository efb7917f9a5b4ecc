"""The ingress deployment: serves HTTP and plays rollouts over the other deployments. Needs no GPU.

Where Serve listens is asked of Serve itself, whoever started it: `serve run` reads no config of ours.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from deployments import logs
from deployments.agents.settings import agent_deployment
from deployments.chat.chat_tokenizer import TransformersChatTokenizer
from deployments.images.remote_images import RemoteImages
from deployments.rpc.own_address import HttpOptions, own_address
from deployments.rpc.store_client import job_store_client, policy_store_client, rollout_record_store_client
from deployments.sessions.store_client import session_store_client
from deployments.upstream.ray_serve.direct_ingress import listen_on_own_port
from deployments.upstream.ray_serve.install import install
from deployments.upstream.ray_serve.own_replica import call_at_shutdown, most_replicas
from deployments.upstream.ray_serve.proxy_handles import keep_proxy_handles
from deployments.upstream.ray_serve.serve_internals import running_http_options
from service.access.access_control import AccessControl
from service.access.exposure import refuse_exposed
from service.access.keys import Caller
from service.admission.admission import Admission
from service.agents.session_judge import SessionJudge
from service.agents.sessions import AgentSessions, RequestAgents
from service.http.serve_requests import ServeRequests, request_pacer
from service.images.request_images import RequestImages
from service.jobs.runner import JobRunner
from service.metrics.ingress_metrics import HttpMetrics, HttpMetricsMiddleware, IngressGauges, export
from service.metrics.rollout_metrics import RolloutMetrics
from service.model_server.calls import ModelCalls
from service.model_server.tinker_sampling import TinkerSampling
from service.remote.data import RemoteData
from service.remote.environment import RemoteEnvironment
from service.remote.generator import RemoteGenerator
from service.remote.policy import RemotePolicy
from service.remote.response_parser import ProcessResponseParser
from service.replay.replayer import Replayer
from service.replay.same_weights import served_weights
from service.rollout_records.recorder import RolloutRecorder
from service.rollout_records.trainer_reports import TrainerReports
from service.rollout_requests.episodes import EpisodeFactory, build_of
from service.rollout_requests.garbage_collection import freeze_and_tune_collector
from service.rollout_requests.rollout_service import RolloutService
from service.rollout_requests.service_status import Readiness, StorePart, version_of
from service.rollout_requests.task_samples import TaskSampler
from service.rollouts.progress import UNOBSERVED, RolloutObserver
from service.routes.dependencies import AppServices
from service.routes.http_app import build_http_app
from service.scoring.scoring import Scoring
from service.settings import ServiceSettings
from service.tracing.spans import TracedRollouts, TracingMiddleware, tracer_of


def http_options() -> HttpOptions | None:
    """Options of the running Serve; `None` where none runs. Blocks."""
    if not ray.is_initialized():
        return None
    options: HttpOptions | None = running_http_options()
    return options


async def load_chat(settings: ServiceSettings) -> tuple[TransformersChatTokenizer, ProcessResponseParser | None]:
    """The model's tokenizer, and the parser of its responses if the config names one.

    Raises:
        ParserUnusable: a parser of `responses` does not work with the model's tokenizer.
        RolloutFailure: the processes of the parsers do not answer.
    """
    engine, responses = settings.engine, settings.responses
    name = engine.tokenizer or engine.model
    skip, split = responses.skip_special_tokens, engine.split_special_tokens
    tokenizer = TransformersChatTokenizer.load(name, engine.model, skip, split, engine.hub)
    tokenizer.prepare_info()
    return tokenizer, await ProcessResponseParser.start(responses, name, tokenizer.ends_of_turn, engine.hub)


@serve.ingress()
class Ingress:
    """Starts when the generator has started: every request that reaches it can be played.

    Its model bounds what a request may ask for, so that the constructor waits until a generator replica answers.
    """

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
        images: DeploymentHandle[Any] | None = None,
        records: DeploymentHandle[Any] | None = None,
    ) -> None:
        logs.configure()
        install()
        listen_on_own_port()
        options = await asyncio.to_thread(http_options)
        assert options is not None
        refuse_exposed(settings.access, options)
        access = AccessControl.of(settings.access, options.host)
        limits = settings.limits

        rollout_metrics: RolloutMetrics | None = None
        if settings.metrics:
            rollout_metrics = RolloutMetrics(settings.sandboxed_tasks)
        self._http_metrics = HttpMetrics() if settings.metrics else None
        observer: RolloutObserver = rollout_metrics or UNOBSERVED
        self._tracer = None
        if settings.tracing is not None:
            replica_id = serve.get_replica_context().replica_tag
            self._tracer = tracer_of(settings.tracing, replica_id, version_of("rollout-service"))
            observer = TracedRollouts(self._tracer, observer, settings.tracing.rollouts_per_request)

        remote = RemoteGenerator(
            generator,
            settings.scheduling.window_factor,
            None if rollout_metrics is None else partial(rollout_metrics.took, "queue"),
            None if rollout_metrics is None else rollout_metrics.generated,
        )
        follows_folder = settings.policy.follow is not None
        policy = RemotePolicy(policy_store_client(policy_store), follows_folder, remote.note_rolling)
        self._watching = asyncio.create_task(policy.run())
        tasks = {task_name: RemoteEnvironment(task_name, handle) for task_name, handle in environments.items()}
        remote_data = None if data is None else RemoteData(data)
        sampler = TaskSampler(tasks, remote_data, settings.data_by_task.keys())
        stores: dict[StorePart, Callable[[], Awaitable[object]]] = {
            "data": sampler.sizes,
            "policy": lambda: policy.store.state(0.0),
        }
        tokenizer, parser = await load_chat(settings)
        described = await remote.describe()
        admission = Admission(settings.admission, described.max_model_len, most_replicas)

        calls = ModelCalls(remote, policy, admission, limits.generation_timeout_s)
        agent_sessions: AgentSessions | None = None
        if sessions is not None and settings.sessions is not None:
            session_store, base_url = session_store_client(sessions), settings.sessions.base_url
            stores["sessions"] = session_store.answer
            agent_sessions = AgentSessions(session_store, policy, access, SessionJudge(tasks), base_url)
        agents_of: Callable[[Caller], RequestAgents] | None = None
        programs: dict[str, RemoteEnvironment] = {}
        if agent_sessions is not None and agents:
            programs = {name: RemoteEnvironment(agent_deployment(name), handle) for name, handle in agents.items()}
            sandboxed = settings.sandboxed_tasks.keys()
            agents_of = partial(RequestAgents, agent_sessions, programs, own_address(options), admission, sandboxed)

        request_images: RequestImages | None = None
        if images is not None and settings.images is not None:
            image_store = RemoteImages(images)
            request_images = RequestImages(image_store, settings.images, takes_images=described.takes_images)
            stores["images"] = image_store.answer

        episodes = EpisodeFactory(frozenset(tasks), described, tokenizer, limits, settings.agents_by_task)
        recorder: RolloutRecorder | None = None
        reports: TrainerReports | None = None
        if records is not None:
            record_store = rollout_record_store_client(records)
            recorder = RolloutRecorder(record_store, remote.node_of)
            reports = TrainerReports(record_store, remote, lambda: policy.served_versions)
        rollouts = RolloutService(
            remote,
            tasks,
            policy,
            episodes,
            limits,
            admission,
            sampler,
            parser,
            observer,
            agents_of,
            request_images,
            recorder,
        )
        rollouts.body_parser.start()
        job_runner: JobRunner | None = None
        if jobs is not None and settings.jobs is not None:
            job_runner = JobRunner(job_store_client(jobs), rollouts, access, settings.jobs.max_body_bytes)
            stores["jobs"] = job_runner.store.answer
            call_at_shutdown(job_runner.hand_over)
        self._describing = asyncio.create_task(describe_tasks(tasks.values()))
        checked = {**tasks, **{agent_deployment(name): program for name, program in programs.items()}}
        scoring = Scoring(partial(admission.metered, remote), policy, limits, lambda: described)
        self._services = AppServices(
            rollouts=rollouts,
            access=access,
            readiness=Readiness(remote, checked, stores),
            scoring=scoring,
            jobs=job_runner,
            calls=calls,
            sessions=agent_sessions,
            images=request_images,
            records=recorder,
            replayer=Replayer(
                remote,
                partial(served_weights, policy),
                tokenizer,
                described,
                build_of(described.settings_hash),
                limits.generation_timeout_s,
            ),
            reports=reports,
            tinker=TinkerSampling(calls, scoring),
        )
        if rollout_metrics is not None and self._http_metrics is not None:
            gauges = IngressGauges(admission, remote, policy)
            self._exporting = export(rollout_metrics, self._http_metrics, gauges)
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


async def describe_tasks(tasks: Iterable[RemoteEnvironment]) -> None:
    """Asks each environment for its description, which took 50 ms of the first rollout.

    An environment that does not answer is asked again by the first request with its task.
    """
    await asyncio.gather(*(task.known_description() for task in tasks), return_exceptions=True)
