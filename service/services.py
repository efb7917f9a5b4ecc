"""The parts of one ingress replica that its routes call, and how they are made of the config and other deployments."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from ray.serve.handle import DeploymentHandle

from deployments.agents.settings import agent_deployment
from deployments.chat.chat_tokenizer import TransformersChatTokenizer
from deployments.images.store import RemoteImages
from deployments.rpc.handle_calls import job_store_client, rollout_record_store_client
from deployments.sessions.store import session_store_client
from deployments.upstream.ray_serve.direct_ingress import HttpOptions, own_address
from deployments.upstream.ray_serve.own_replica import most_replicas
from service.access.access_control import AccessControl
from service.admission.admission import Admission
from service.agents.sessions import AgentSessions, RequestAgents
from service.images.request_images import RequestImages
from service.jobs.runner import JobRunner
from service.model_server.calls import ModelCalls
from service.model_server.tinker_sampling import TinkerSampling
from service.remote.environment import RemoteData, RemoteEnvironment
from service.remote.generator import RemoteGenerator
from service.remote.policy import RemotePolicy
from service.remote.response_parser import ProcessResponseParser
from service.replay.replayer import Replayer, served_weights
from service.rollout_records.recorder import RolloutRecorder
from service.rollout_records.trainer_reports import TrainerReports
from service.rollout_requests.episodes import EpisodeFactory, build_of
from service.rollout_requests.rollout_service import RolloutService
from service.rollout_requests.service_status import Readiness, StorePart
from service.rollout_requests.task_samples import TaskSampler
from service.rollouts.progress import RolloutObserver
from service.scoring.scoring import Scoring
from service.settings import ServiceSettings, TrainersSettings

Handle = DeploymentHandle[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Handles:
    """The other deployments, as `service.app.build` binds them; `None` for those that the config does not ask for."""

    generator: Handle
    policy_store: Handle
    environments: Mapping[str, Handle]
    """By task."""
    agents: Mapping[str, Handle]
    """Those that run agents, by task."""
    data: Handle | None
    jobs: Handle | None
    sessions: Handle | None
    images: Handle | None
    records: Handle | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AppServices:
    """The parts of one ingress replica that its routes call. `app.state.services` holds them."""

    rollouts: RolloutService
    access: AccessControl
    readiness: Readiness
    scoring: Scoring
    replayer: Replayer
    calls: ModelCalls
    tinker: TinkerSampling
    jobs: JobRunner | None = None
    """`None` if the service keeps no jobs."""
    sessions: AgentSessions | None = None
    """`None` if it keeps none."""
    images: RequestImages | None = None
    """`None` if it takes none."""
    records: RolloutRecorder | None = None
    """`None` if it keeps no records of rollouts."""
    reports: TrainerReports | None = None
    """`None` if `records` is."""
    trainers: TrainersSettings | None = None
    """`None` if there are no routes for trainers' own clients."""


async def _load_chat(settings: ServiceSettings) -> tuple[TransformersChatTokenizer, ProcessResponseParser | None]:
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


async def build_services(
    settings: ServiceSettings,
    handles: Handles,
    generator: RemoteGenerator,
    policy: RemotePolicy,
    observer: RolloutObserver,
    http: HttpOptions,
) -> AppServices:
    """Makes all parts. Waits until a generator replica answers: its model bounds what a request may ask for.

    Args:
        observer: told of the progress of rollouts.
        http: where Serve listens.

    Raises:
        ParserUnusable, RolloutFailure: what `_load_chat` raises.
        GenerationLost: no generator replica answers.
    """
    limits, access = settings.limits, AccessControl.of(settings.access)
    tokenizer, parser = await _load_chat(settings)
    engine = await generator.describe()
    admission = Admission(settings.admission, engine.max_model_len, most_replicas)
    tasks = {name: RemoteEnvironment(name, handle) for name, handle in handles.environments.items()}
    programs = {name: RemoteEnvironment(agent_deployment(name), handle) for name, handle in handles.agents.items()}
    data = None if handles.data is None else RemoteData(handles.data)
    sampler = TaskSampler(tasks, data, settings.data_by_task.keys())
    calls = ModelCalls(generator, policy, admission, engine.model_names)
    sessions = _sessions(settings, handles, policy, access, tasks)
    agents_of = None
    if sessions is not None and programs:
        agents_of = partial(RequestAgents, sessions, programs, own_address(http))
    images, image_store = None, None if handles.images is None else RemoteImages(handles.images)
    if image_store is not None and settings.images is not None:
        images = RequestImages(image_store, settings.images, takes_images=engine.takes_images)
    recorder = reports = None
    if handles.records is not None:
        record_store = rollout_record_store_client(handles.records)
        recorder = RolloutRecorder(record_store)
        reports = TrainerReports(record_store, generator, lambda: policy.served_versions)
    rollouts = RolloutService(
        generator,
        tasks,
        policy,
        EpisodeFactory(frozenset(tasks), engine, tokenizer, limits, settings.agents_by_task),
        limits,
        admission,
        sampler,
        parser,
        observer,
        agents_of,
        images,
        recorder,
    )
    jobs = None
    if handles.jobs is not None and settings.jobs is not None:
        jobs = JobRunner(job_store_client(handles.jobs), rollouts, access, settings.jobs.max_body_bytes)
    stores: dict[StorePart, Callable[[], Awaitable[object]] | None] = {
        "data": sampler.sizes,
        "policy": partial(policy.store.state, 0.0),
        "sessions": None if sessions is None else sessions.store.answer,
        "images": None if image_store is None else image_store.answer,
        "jobs": None if jobs is None else jobs.store.answer,
    }
    scoring = Scoring(generator, policy, limits, engine)
    return AppServices(
        rollouts=rollouts,
        access=access,
        readiness=Readiness(
            generator,
            {**tasks, **{agent_deployment(name): program for name, program in programs.items()}},
            {part: answer for part, answer in stores.items() if answer is not None},
        ),
        scoring=scoring,
        replayer=Replayer(
            generator, partial(served_weights, policy), tokenizer, engine, build_of(engine.settings_hash)
        ),
        calls=calls,
        tinker=TinkerSampling(calls, scoring),
        jobs=jobs,
        sessions=sessions,
        images=images,
        records=recorder,
        reports=reports,
        trainers=settings.trainers,
    )


def _sessions(
    settings: ServiceSettings,
    handles: Handles,
    policy: RemotePolicy,
    access: AccessControl,
    tasks: Mapping[str, RemoteEnvironment],
) -> AgentSessions | None:
    if handles.sessions is None or settings.sessions is None:
        return None
    return AgentSessions(session_store_client(handles.sessions), policy, access, tasks, settings.sessions.base_url)
