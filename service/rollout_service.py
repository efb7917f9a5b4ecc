"""What the service does, without HTTP: takes requests in, plays them, sums them up, knows its tasks."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field

from rollout_client.contract import (
    RolloutRequest,
    RolloutSummary,
    SampleError,
    SampleInput,
    SampleResult,
    TaskInfo,
)
from service.remote.hops import RemoteEnvironment, RemoteGenerator
from service.remote.policy import RemotePolicy
from service.requests.chat_tokenizer import TransformersChatTokenizer
from service.requests.episodes import EpisodeFactory
from service.rollouts.early_stopping import EarlyStopping
from service.rollouts.episode import Episode
from service.rollouts.loop import Call, Table, play_request, with_timeout
from service.rollouts.metrics import MetricsAccumulator
from service.rollouts.schedule import Async, Lockstep
from service.settings import Limits, ServiceSettings

READY_WITHIN_S = 5.0


@dataclass(frozen=True, slots=True)
class StartedRollout:
    request: RolloutRequest
    request_id: str
    episodes: list[Episode]
    metrics_accumulator: MetricsAccumulator = field(default_factory=MetricsAccumulator)
    """Of what has ended so far."""


class SampleFailed(Exception):
    """A sample failed in a request that asked not to go on then."""

    def __init__(self, sample_position: int, generation_index: int, error: SampleError) -> None:
        self.sample_position = sample_position
        self.kind = error.kind
        super().__init__(f"generation {generation_index} failed: {error.message}")


class RolloutService:
    """One ingress replica's rollouts."""

    def __init__(
        self,
        generator: RemoteGenerator,
        environments: Mapping[str, RemoteEnvironment],
        policy: RemotePolicy,
        intake: EpisodeFactory,
        limits: Limits,
    ) -> None:
        self.policy = policy
        self.environments = environments
        self.limits = limits
        self._generator = generator
        self._intake = intake

    @classmethod
    async def connect(
        cls,
        settings: ServiceSettings,
        generator: RemoteGenerator,
        environments: Mapping[str, RemoteEnvironment],
        policy: RemotePolicy,
    ) -> "RolloutService":
        """Waits for the generator, whose model says what a request may ask for."""
        tokens = TransformersChatTokenizer.load(settings.engine.tokenizer or settings.engine.model)
        intake = EpisodeFactory(frozenset(environments), await generator.describe(), tokens, settings.limits)
        return cls(generator, environments, policy, intake, settings.limits)

    def start(self, request: RolloutRequest) -> StartedRollout:
        """Raises `RequestProblem` if the request asks for what this service does not have."""
        return StartedRollout(request, *self._intake.episodes(request))

    async def play(self, started: StartedRollout) -> AsyncGenerator[tuple[int, SampleResult], None]:
        """Yields each sample the moment it ends, with its position in the response; closing it cancels the rest.

        Raises:
            SampleFailed: a sample failed and the request said `on_error: fail`.
        """
        request = started.request
        early_stopping = EarlyStopping(request.keep, {episode: episode.identity.group for episode in started.episodes})
        playing = play_request(started.episodes, self._table(request), early_stopping, request.deadline_s)
        async with aclosing(playing) as finished:
            async for episode in finished:
                result = episode.result()
                started.metrics_accumulator.add(result)
                yield episode.identity.position, result
                if episode.error is not None and request.on_error == "fail":
                    raise SampleFailed(episode.identity.group, episode.identity.generation_index, episode.error)

    def _table(self, request: RolloutRequest) -> Table:
        return Table(
            self._generator,
            self.environments,
            Lockstep() if request.schedule == "lockstep" else Async(),
            generation_timeout_s=self.limits.generation_timeout_s,
            step_timeout_s=self.limits.step_timeout_s,
        )

    async def tasks(self) -> list[TaskInfo]:
        descriptions = await asyncio.gather(*(environment.describe() for environment in self.environments.values()))
        return [
            TaskInfo(
                task_name=description.task_name,
                description=description.description,
                fields=description.fields,
                example=SampleInput.model_validate(description.example),
            )
            for description in descriptions
        ]

    async def example_samples(self, task_name: str, count: int, seed: int) -> list[SampleInput]:
        samples = await self.environments[task_name].example_samples(count, seed)
        return [SampleInput.model_validate(sample) for sample in samples]

    async def check_ready(self) -> None:
        """Raises a `RolloutFailure` that says which deployment does not answer."""
        asked: dict[str, Call[object]] = {"generator": self._generator.describe}
        asked |= {f"environment {name!r}": environment.describe for name, environment in self.environments.items()}
        await asyncio.gather(
            *(with_timeout(READY_WITHIN_S, call, f"The answer of the {who}")() for who, call in asked.items())
        )

    def summary_of(self, started: StartedRollout) -> RolloutSummary:
        metrics_accumulator = started.metrics_accumulator
        return RolloutSummary(
            request_id=started.request_id,
            metrics=metrics_accumulator.metrics(),
            policy=metrics_accumulator.policy(self.policy.version),
        )
