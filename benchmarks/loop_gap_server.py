"""The ingress that `benchmarks/loop_gap.py` measures: the real HTTP application over a generator and an environment
that cost nothing, with a probe of its event loop.

`POST /probe` starts a new measurement; `GET /probe` gives the longest gap since then.
"""

import asyncio
import socket
from collections.abc import Sequence
from contextlib import suppress
from itertools import cycle, islice
from multiprocessing.connection import Connection
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from benchmarks.loop_probe import LoopProbe
from deployments.chat.chat_tokenizer import TransformersChatTokenizer
from deployments.protocols.environments import RefusedField, StepRequest, TaskDescription
from deployments.protocols.generation import (
    Environment,
    Generation,
    GenerationRequest,
    Generator,
    WeightSpan,
    packed_ids,
    packed_logprobs,
)
from deployments.protocols.images import ImageTokens
from deployments.protocols.replicas import GeneratorDescription
from rollout_env import ChatMessage, StepOutcome
from service.access.access_control import OPEN_TO_ALL
from service.admission.admission import Admission
from service.remote.policy import RemotePolicy
from service.rollout_requests.episodes import EpisodeFactory
from service.rollout_requests.garbage_collection import freeze_and_tune_collector
from service.rollout_requests.rollout_service import RolloutService
from service.rollout_requests.service_status import Readiness
from service.rollout_requests.task_samples import TaskSampler
from service.routes.http_app import build_http_app
from service.scoring.scoring import Scoring
from service.services import AppServices
from service.settings import AdmissionSettings, RequestLimits

MODEL = "models/tiny"
TASK = "task"
MAX_MODEL_LEN = 2**17
GENERATION_S = 0.1
"""All generations end when the clock shows a multiple of this, many in one event-loop iteration: the hardest case."""
MOST_TOKENS_COPIED_INLINE = 4096
DESCRIPTION = GeneratorDescription("tiny", MAX_MODEL_LEN, vocab_size=262)
LETTERS = range(ord("a"), ord("z") + 1)


class FreeGenerator(Generator):
    """Generates `max_new_tokens` letters."""

    def __init__(self) -> None:
        self._ids = packed_ids(islice(cycle(LETTERS), MAX_MODEL_LEN))
        self._logprobs = packed_logprobs(-0.001 * (place % 1000) for place in range(MAX_MODEL_LEN))

    async def generate(self, request: GenerationRequest) -> Generation:
        count = request.max_new_tokens
        if count >= MOST_TOKENS_COPIED_INLINE:
            # The time that this takes is not the ingress's.
            generation = await asyncio.to_thread(self._generation, count)
        else:
            generation = self._generation(count)
        now = asyncio.get_running_loop().time()
        await asyncio.sleep(GENERATION_S - now % GENERATION_S)
        return generation

    def _generation(self, count: int) -> Generation:
        return Generation(self._ids[:count], self._logprobs[:count], "stop", (WeightSpan("1", 0, count),))

    async def image_tokens(self, names: Sequence[str]) -> list[ImageTokens]:
        raise NotImplementedError

    def is_generating(self, rollout_id: str) -> bool:  # noqa: ARG002
        return True

    def interrupt(self, rollout_id: str) -> bool:  # noqa: ARG002
        return False

    def release(self, rollout_id: str) -> None:
        """There is nothing to forget."""

    async def describe(self) -> GeneratorDescription:
        return DESCRIPTION


class FreeEnvironment(Environment):
    """Observes as many characters as `observation_chars` says, after every turn."""

    def __init__(self) -> None:
        self._observation = ""

    async def step(self, request: StepRequest) -> StepOutcome:
        wanted = request.extra_env_info.get("observation_chars", 20)
        if len(self._observation) < wanted:
            self._observation = "word " * (wanted // 5 + 1)
        observation: ChatMessage = {"role": "user", "content": self._observation[:wanted]}
        return StepOutcome(observation, reward=1.0, terminated=False)

    async def describe(self) -> TaskDescription:
        return TaskDescription(TASK, "Costs nothing.", fields={})

    async def refused_fields(self, extra_env_infos: Sequence[dict[str, Any]]) -> list[RefusedField]:  # noqa: ARG002
        return []

    async def example_samples(self, count: int, seed: int) -> list[dict[str, Any]]:  # noqa: ARG002
        return [{"task_name": TASK, "messages": [{"role": "user", "content": "?"}]}] * count


class CancelsOnDisconnect:
    """Cancels the handling of a request whose client has gone, as Serve does and uvicorn does not."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body_ended = asyncio.Event()
        is_disconnected = asyncio.get_running_loop().create_future()

        async def receive_body() -> Message:
            if body_ended.is_set():
                return await asyncio.shield(is_disconnected)
            message = await receive()
            if not message.get("more_body"):
                body_ended.set()
            return message

        async def wait_for_disconnect() -> None:
            await body_ended.wait()
            is_disconnected.set_result(await receive())

        async def handle() -> None:
            await self._app(scope, receive_body, send)

        handling = asyncio.create_task(handle())
        watching = asyncio.create_task(wait_for_disconnect())
        await asyncio.wait([handling, watching], return_when=asyncio.FIRST_COMPLETED)
        for task in (watching, handling):
            task.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        with suppress(asyncio.CancelledError):
            await handling


def build() -> ASGIApp:
    generator, limits = FreeGenerator(), RequestLimits()
    factory = EpisodeFactory(frozenset({TASK}), DESCRIPTION, TransformersChatTokenizer.load(MODEL), limits)
    policy = RemotePolicy(None)  # type: ignore[arg-type]  # no request of the benchmark demands a version
    # What is refused for now is not measured.
    unbounded = AdmissionSettings(max_rollouts=2**62, max_tokens=2**62, max_body_bytes=2**62)
    admission = Admission(unbounded, MAX_MODEL_LEN)
    environments = {TASK: FreeEnvironment()}
    sampler = TaskSampler(environments)
    service = RolloutService(generator, environments, policy, factory, limits, admission, sampler)
    service.body_parser.start()
    unused: Any = None
    services = AppServices(
        rollouts=service,
        access=OPEN_TO_ALL,
        readiness=Readiness(generator, environments, {}),
        scoring=Scoring(generator, policy, limits, DESCRIPTION),
        replayer=unused,
        calls=unused,
        tinker=unused,
    )
    app = build_http_app(services)
    probe = LoopProbe()

    @app.post("/probe")
    async def restart() -> None:
        probe.restart()

    @app.get("/probe")
    async def gaps() -> dict[str, float]:
        return probe.gaps()

    return CancelsOnDisconnect(app)


def serve(started: Connection) -> None:
    """Sends its port through `started`, then serves for ever."""
    app = build()
    freeze_and_tune_collector()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        started.send(listening.getsockname()[1])
        uvicorn.Server(uvicorn.Config(app, log_level="critical")).run([listening])
