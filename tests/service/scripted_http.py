"""The HTTP application over scripted parts, which note the calls that reach them."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from copy import copy
from functools import cache, partial
from typing import Any, TypeVar

import httpx
from fastapi import FastAPI
from starlette.datastructures import State

from deployments.chat.chat_tokenizer import TransformersChatTokenizer
from deployments.protocols.generation import Generation, GenerationRequest, Generator
from deployments.protocols.model_server import ModelServer
from deployments.protocols.replicas import GeneratorDescription
from rollout_client import AsyncRolloutClient
from service.access.access_control import OPEN_TO_ALL, AccessControl
from service.admission.admission import Admission
from service.agents.sessions import AgentSessions
from service.images.request_images import RequestImages
from service.model_server.calls import ModelCalls
from service.model_server.tinker_sampling import TinkerSampling
from service.remote.policy import RemotePolicy
from service.replay.replayer import Replayer, served_weights
from service.rollout_records.recorder import RolloutRecorder
from service.rollout_records.trainer_reports import TrainerReports
from service.rollout_requests.episodes import EpisodeFactory
from service.rollout_requests.rollout_service import RolloutService
from service.rollout_requests.service_status import Readiness
from service.rollout_requests.task_samples import TaskSampler
from service.rollouts.episode_records import ServiceBuild
from service.routes.http_app import build_http_app
from service.scoring.scoring import Scoring
from service.services import AppServices
from service.settings import AdmissionSettings, RequestLimits, TrainersSettings
from tests.fakes.model_server import REFUSED, ScriptedModelServer
from tests.fakes.policy_store import ScriptedStore
from tests.paths import TINY_MODEL
from tests.service.scripted import ScriptedEnvironment, ScriptedGenerator, outcome
from tests.virtual_time import runs

VOCAB_SIZE = 262
MAX_MODEL_LEN = 100
DESCRIPTION = GeneratorDescription("tiny", MAX_MODEL_LEN, VOCAB_SIZE)
LIMITS = RequestLimits(max_body_bytes=4096, max_rollouts_per_request=100)
NDJSON = "application/x-ndjson"
SAMPLE: dict[str, Any] = {"task_name": "math", "messages": [{"role": "user", "content": "What is 1 + 1?"}]}
tokenizer = TransformersChatTokenizer.load(str(TINY_MODEL))
Returned = TypeVar("Returned")


class ScriptedReplicas:
    """One replica without a name, which a scripted generator is."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator

    def replicas(self) -> Sequence[str]:
        return ()

    async def generate_on(self, replica: str, request: GenerationRequest) -> Generation:
        return await self._generator.generate(request)


class ScriptedHttp:
    def __init__(
        self,
        limits: RequestLimits = LIMITS,
        sets_request_id_header: bool = True,
        admission: AdmissionSettings | None = None,
        generator: ScriptedGenerator | None = None,
        access: AccessControl = OPEN_TO_ALL,
        model_server: ModelServer | None = None,
        session_store: Any = None,
        images: RequestImages | None = None,
        recorder: RolloutRecorder | None = None,
        reports: TrainerReports | None = None,
        store: ScriptedStore | None = None,
        trainers: TrainersSettings | None = None,
        description: GeneratorDescription = DESCRIPTION,
    ) -> None:
        self.store = store or ScriptedStore()
        self.generator = generator or ScriptedGenerator(["A"])
        tasks = ("math", "sliding_puzzle")
        self.environments = {task: ScriptedEnvironment([outcome(terminated=True)]) for task in tasks}
        factory = EpisodeFactory(frozenset(self.environments), description, tokenizer, limits)
        policy = RemotePolicy(self.store)  # type: ignore[arg-type]
        self.admission = Admission(admission or AdmissionSettings(), MAX_MODEL_LEN)
        parts = self.generator, self.environments, policy, factory, limits, self.admission
        self.rollouts = RolloutService(*parts, TaskSampler(self.environments), records=recorder)
        calls = None if model_server is None else ModelCalls(model_server, policy, self.admission)
        sessions = None
        if calls is not None and session_store is not None:
            sessions = AgentSessions(session_store, policy, access, self.environments)
        kept = {"sessions": sessions, "images": images, "records": recorder, "reports": reports, "trainers": trainers}
        self.app = app_of(self.generator, self.rollouts, access, sets_request_id_header, calls, **kept)

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Sends one request. An exception that the application does not handle comes back as its 500."""
        return asyncio.run(self.asked(lambda http: http.request(method, path, **options)))

    async def asked(self, ask: Callable[[httpx.AsyncClient], Awaitable[Returned]]) -> Returned:
        """Gives `ask` an HTTP client of the application."""
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://service") as http:
            return await ask(http)

    def post(self, body: dict[str, Any] | str | bytes, **headers: str) -> httpx.Response:
        """`POST /rollout`; an underscore in the name of a header stands for a hyphen."""
        content = json.dumps(body) if isinstance(body, dict) else body
        return self.request("POST", "/rollout", content=content, headers=named(headers))

    def put_version(
        self, content: Any = b"weights", version: Any = 7, query: str = "", **headers: str
    ) -> httpx.Response:
        """`PUT /policy/versions/{version}`, headers as in `post`."""
        return self.request("PUT", f"/policy/versions/{version}{query}", content=content, headers=named(headers))

    @runs
    async def call(self, method: Callable[[AsyncRolloutClient], Awaitable[Returned]]) -> Returned:
        """Calls a method of a client of the application."""
        async with httpx.AsyncClient(transport=httpx.ASGITransport(self.app)) as http_client:
            return await method(AsyncRolloutClient("http://service", retries=0, http_client=http_client))

    @property
    def has_started_something(self) -> bool:
        return bool(self.generator.requests or any(environment.requests for environment in self.environments.values()))


def app_of(
    generator: Generator,
    rollouts: RolloutService,
    access: AccessControl,
    sets_request_id_header: bool = True,
    calls: ModelCalls | None = None,
    **kept: Any,
) -> FastAPI:
    """An application with a state of its own. Its routes are built once for all tests: each time takes 0.1 s.

    Args: `kept` are the settings of trainers, and jobs, sessions, images, records and reports where it keeps these.
    """
    calls = calls or ModelCalls(ScriptedModelServer(REFUSED), rollouts.policy, rollouts.admission)
    app = copy(app_without_state(sets_request_id_header))
    app.state = State()
    scoring = Scoring(generator, rollouts.policy, rollouts.limits, DESCRIPTION)
    replicas: Any = ScriptedReplicas(generator)
    app.state.services = AppServices(
        rollouts=rollouts,
        replayer=Replayer(replicas, partial(served_weights, rollouts.policy), tokenizer, DESCRIPTION, ServiceBuild()),
        access=access,
        readiness=Readiness(generator, rollouts.environments, {"policy": lambda: rollouts.policy.store.state(0.0)}),
        scoring=scoring,
        calls=calls,
        tinker=TinkerSampling(calls, scoring),
        **kept,
    )
    return app


@cache
def app_without_state(sets_request_id_header: bool) -> FastAPI:
    unused: Any = None
    return build_http_app(unused, sets_request_id_header)


def named(headers: dict[str, str]) -> dict[str, str]:
    return {name.replace("_", "-"): value for name, value in headers.items()}
