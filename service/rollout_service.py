"""What the service does, without HTTP: takes requests in, plays them, sums them up, knows its tasks."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing

from deployments.protocols import Environment, Generator
from rollout_client.contract import (
    RolloutRequest,
    RolloutSummary,
    SampleError,
    SampleInput,
    SampleResult,
)
from rollout_client.task_contract import TaskInfo
from service.remote.policy import RemotePolicy
from service.requests.chat_tokenizer import TransformersChatTokenizer
from service.requests.episodes import EpisodeFactory
from service.rollouts.early_stopping import EarlyStopping
from service.rollouts.episode import Episode
from service.rollouts.loop import Call, RolloutContext, play_request, with_timeout
from service.rollouts.request_metrics import RequestMetricsAccumulator
from service.rollouts.schedule import AsyncSchedule, LockstepSchedule
from service.settings import Limits, ServiceSettings

READY_WITHIN_S = 5.0
MOST_BYTES_STARTED_INLINE = 2**12
MOST_GENERATIONS_STARTED_INLINE = 16
"""Rendering and tokenizing so much takes a millisecond or two."""


class SampleFailed(Exception):
    """A sample failed in a request that asked not to go on then."""

    def __init__(self, sample_position: int, generation_index: int, error: SampleError) -> None:
        self.sample_position = sample_position
        self.kind = error.kind
        super().__init__(f"generation {generation_index} failed: {error.message}")


class RunningRollout:
    """One request under way. Iterate it for the samples, each with its position in the response, the moment they end.

    Guarantees: every sample comes exactly once; closing the iteration cancels the samples that still run.
    """

    def __init__(
        self,
        request: RolloutRequest,
        request_id: str,
        episodes: Sequence[Episode],
        context: RolloutContext,
        current_version: Callable[[], int | None],
    ) -> None:
        self.request_id = request_id
        self._request = request
        self._episodes = episodes
        self._context = context
        self._current_version = current_version
        self._metrics = RequestMetricsAccumulator()
        self._results = self._play()

    def __aiter__(self) -> AsyncGenerator[tuple[int, SampleResult], None]:
        """Raises `SampleFailed` if a sample failed and the request said `on_error: fail`."""
        return self._results

    async def aclose(self) -> None:
        await self._results.aclose()

    @property
    def summary(self) -> RolloutSummary:
        """Metrics and weight versions of the samples that have ended so far."""
        metrics = self._metrics
        return RolloutSummary(
            request_id=self.request_id, metrics=metrics.metrics(), policy=metrics.policy(self._current_version())
        )

    async def _play(self) -> AsyncGenerator[tuple[int, SampleResult], None]:
        request = self._request
        early_stopping = EarlyStopping(request.keep, {episode: episode.identity.group for episode in self._episodes})
        playing = play_request(self._episodes, self._context, early_stopping, request.deadline_s)
        async with aclosing(playing) as ended:
            async for episode in ended:
                result = episode.result()
                self._metrics.add(result)
                yield episode.identity.position, result
                if episode.error is not None and request.on_error == "fail":
                    raise SampleFailed(episode.identity.group, episode.identity.generation_index, episode.error)


class RolloutService:
    """One ingress replica's rollouts."""

    def __init__(
        self,
        generator: Generator,
        environments: Mapping[str, Environment],
        policy: RemotePolicy,
        episode_factory: EpisodeFactory,
        limits: Limits,
    ) -> None:
        self.policy = policy
        self.environments = environments
        self.limits = limits
        self._generator = generator
        self._episode_factory = episode_factory

    @classmethod
    async def connect(
        cls,
        settings: ServiceSettings,
        generator: Generator,
        environments: Mapping[str, Environment],
        policy: RemotePolicy,
    ) -> "RolloutService":
        """Waits for the generator, whose model says what a request may ask for."""
        tokens = TransformersChatTokenizer.load(settings.engine.tokenizer or settings.engine.model)
        episode_factory = EpisodeFactory(frozenset(environments), await generator.describe(), tokens, settings.limits)
        return cls(generator, environments, policy, episode_factory, settings.limits)

    async def rollout(self, request: RolloutRequest, request_id: str, body_bytes: int) -> RunningRollout:
        """Validates the request, waits for the weights that it demands, and plays it as the result is iterated.

        Args:
            body_bytes: size of the request's body. Long prompts take the tokenizer seconds: above a bound they are
                rendered in a thread, so that other requests go on.

        Raises:
            RequestProblem: the request asks for what this service does not have.
            PolicyNotCurrent: the weights that it demands are not current, and do not become so in time.
        """
        if body_bytes <= MOST_BYTES_STARTED_INLINE and request.num_generations <= MOST_GENERATIONS_STARTED_INLINE:
            episodes = self._episode_factory.episodes(request, request_id)
        else:
            episodes = await asyncio.to_thread(self._episode_factory.episodes, request, request_id)
        await self.policy.wait_for_version(request.policy)
        return RunningRollout(request, request_id, episodes, self._context(request), lambda: self.policy.version)

    def _context(self, request: RolloutRequest) -> RolloutContext:
        return RolloutContext(
            self._generator,
            self.environments,
            LockstepSchedule() if request.schedule == "lockstep" else AsyncSchedule(),
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
