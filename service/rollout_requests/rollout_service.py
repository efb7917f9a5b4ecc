"""One request without HTTP: validates it, waits for its weights, plays it, computes its metrics."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import TypeVar

from deployments.failures import RolloutFailure
from deployments.protocols.chat import ResponseParser
from deployments.protocols.generation import Environment, Generator
from rollout_client.contract.info import ServiceInfo
from rollout_client.contract.rollouts import RolloutRequest, RolloutSummary, SampleError, SampleResult
from rollout_client.contract.sample_ranges import NextSampleRange, SampleRange
from service.access.keys import ANYBODY, Caller
from service.admission.admission import Admission
from service.agents.runs import AgentRuns
from service.remote.policy import RemotePolicy
from service.rollout_requests.body_parser import BodyParser
from service.rollout_requests.episodes import EpisodeFactory
from service.rollout_requests.garbage_collection import PacedCollections, free_items
from service.rollout_requests.parsing import BodyBounds
from service.rollout_requests.sample_preparation import (
    TaskDescriptions,
    refuse_bad_extra_env_info,
    start_samples,
    task_descriptions,
    tasks_with_start,
)
from service.rollout_requests.service_status import service_info
from service.rollout_requests.task_samples import TaskSampler
from service.rollout_requests.validation import refuse_large_echo
from service.rollouts.early_stopping import EarlyStopping
from service.rollouts.episode import Episode
from service.rollouts.episode_records import Echo
from service.rollouts.loop import RolloutContext, play_request
from service.rollouts.metrics import RequestMetricsAccumulator
from service.rollouts.pacing import LoopPacer
from service.rollouts.progress import UNOBSERVED, ProgressLog, RolloutObserver
from service.rollouts.schedule import AsyncSchedule, LockstepSchedule
from service.settings import RequestLimits

MOST_BYTES_PREPARED_INLINE = 2**12
MOST_GENERATIONS_PREPARED_INLINE = 16
"""Rendering and tokenizing a request within these bounds takes 1 to 2 ms, little more than a call in a thread costs."""
MOST_SAMPLES_FREED_INLINE = 512
EndedRollout = tuple[int, SampleResult, Echo | None]
Result = TypeVar("Result")


class SampleFailed(Exception):
    """A sample failed in a request that has `on_error: fail`. `sample_position` is its place in the request."""

    def __init__(self, sample_position: int, generation_index: int, error: SampleError) -> None:
        self.sample_position = sample_position
        self.kind = error.kind
        super().__init__(f"generation {generation_index} failed: {error.message}")


@dataclass(frozen=True, slots=True)
class PreparedEpisodes:
    """Parts that are slow to build for large requests."""

    episodes: Sequence[Episode]
    early_stopping: EarlyStopping[Episode]


class RunningRollout:
    """One request that is played while it is iterated. Yields (position in the response, result, echo) as samples end.

    Guarantees: every sample is yielded exactly once; nothing is started before the first iteration, so one that is
    never iterated needs no closing; after `aclose`, no call of the request is under way.
    """

    def __init__(
        self,
        request: RolloutRequest,
        request_id: str,
        prepared: PreparedEpisodes,
        context: RolloutContext,
        current_version: Callable[[], int | None],
    ) -> None:
        self.request_id = request_id
        self._request = request
        self._prepared: PreparedEpisodes | None = prepared
        self._context = context
        self._current_version = current_version
        self.observer = context.observer
        self._metrics = RequestMetricsAccumulator(request.policy.name)
        self._results = self._play()

    def __aiter__(self) -> AsyncGenerator[EndedRollout, None]:
        """Raises `SampleFailed` after it has yielded a failed sample of a request that has `on_error: fail`."""
        return self._results

    async def aclose(self) -> None:
        """Cancels the samples that still run."""
        await self._results.aclose()

    @property
    def summary(self) -> RolloutSummary:
        """The metrics and weight versions of the samples that have been yielded so far."""
        fields = {"next_samples_from": list(map(next_range, drawn))} if (drawn := self._request.samples_from) else {}
        return RolloutSummary(
            request_id=self.request_id,
            metrics=self._metrics.metrics(),
            policy=self._metrics.policy(self._current_version()),
            **fields,
        )

    def final_summary(self) -> RolloutSummary:
        """The `summary` after the last sample, in a thread; frees what it was computed from there."""
        summary = self.summary
        self._metrics.free_samples()
        return summary

    async def _play(self) -> AsyncGenerator[EndedRollout, None]:
        request = self._request
        # Only the loop refers to the episodes: each is freed when it has ended, not thousands at once at the end.
        prepared, self._prepared = self._prepared, None
        assert prepared is not None
        playing = play_request(prepared.episodes, self._context, prepared.early_stopping, request.deadline_s)
        del prepared
        async with aclosing(playing) as ended:
            async for episode in ended:
                result = episode.result()
                if self._context.progress is not None:
                    self._context.progress.ended(episode)
                self._metrics.add(result, episode.versions.at_end, episode.metrics.tokens_by_replica)
                self.observer.ended(result, episode.versions.at_end)
                yield episode.identity.position, result, episode.start.echo
                if episode.error is not None and request.on_error == "fail":
                    raise SampleFailed(episode.identity.group, episode.identity.generation_index, episode.error)


class RolloutService:
    """Plays the rollouts of one ingress replica."""

    def __init__(
        self,
        generator: Generator,
        environments: Mapping[str, Environment],
        policy: RemotePolicy,
        episode_factory: EpisodeFactory,
        limits: RequestLimits,
        admission: Admission,
        task_sampler: TaskSampler,
        response_parser: ResponseParser | None = None,
        observer: RolloutObserver = UNOBSERVED,
        agents: AgentRuns | None = None,
    ) -> None:
        """Plays with `agents` the tasks that have agents; reports the progress of rollouts to `observer`."""
        self.policy = policy
        self.admission = admission
        self.environments = environments
        self.limits = limits
        self.task_sampler = task_sampler
        self.body_parser = BodyParser(BodyBounds(limits.max_rollouts_per_request, limits.max_sample_bytes))
        self.collections = PacedCollections(lambda: admission.in_flight.rollouts)
        self._generator = generator
        self._episode_factory = episode_factory
        self._pacer = LoopPacer()
        self._response_parser = response_parser
        self._observer = observer
        self._agents = agents

    async def take_samples(self, request: RolloutRequest, hold: Callable[[int], None]) -> int:
        """Puts the samples of `samples_from`, if there are any, into the request; see `TaskSampler.fill`."""
        if not request.samples_from:
            return 0
        return await self.task_sampler.fill(request, self.body_parser, self.limits, hold)

    async def rollout(
        self,
        request: RolloutRequest,
        request_id: str,
        body_bytes: int,
        caller: Caller = ANYBODY,
        progress: ProgressLog | None = None,
    ) -> RunningRollout:
        """Validates the request and waits for the weights that it demands. Iterating the result plays it.

        The request loses its samples.

        Args:
            request_id: unique among all requests.
            body_bytes: size of the request's body. A large request is prepared in a thread, because the tokenizer may
                take seconds for it and other requests must go on.
            caller: the sender; the rollouts share the engines and the quotas of all requests of that caller.
            progress: the log of a request that another process may continue; turns in it are not played again.

        Raises:
            RequestProblem: the request is not valid for this service's tasks, model and limits, or an environment does
                not accept the fields of a sample.
            PolicyNotCurrent: the weights that it demands are not current, and do not become current in time.
            PolicyUnknown: it names a policy that does not exist.
            PolicyStoreLost: the policy store does not answer.
        """
        refuse_large_echo(request.num_generations, body_bytes, self.limits)
        tasks = await task_descriptions(request, request_id, self.environments)
        is_small = body_bytes <= MOST_BYTES_PREPARED_INLINE
        is_small &= request.num_generations <= MOST_GENERATIONS_PREPARED_INLINE
        not_started: dict[int, RolloutFailure] = {}
        if with_start := tasks_with_start(tasks):
            await done_in_thread_unless(is_small, partial(self._episode_factory.refuse_invalid, request, tasks))
            await refuse_bad_extra_env_info(request, request_id, self.environments)
            not_started = await start_samples(request, request_id, with_start, self.environments, progress)
        prepare = partial(self._prepare, request, request_id, tasks, not_started, caller)
        prepared = await done_in_thread_unless(is_small, prepare)
        if not with_start:
            await refuse_bad_extra_env_info(request, request_id, self.environments)
        if progress is not None:
            await done_in_thread_unless(is_small, partial(progress.restore, prepared.episodes))
        # Unused from here on; at the end of the request they would be freed at once.
        samples, request.samples = request.samples, []
        if len(samples) > MOST_SAMPLES_FREED_INLINE:
            await asyncio.to_thread(free_items, samples)
        await self.policy.wait_for_version(request.policy)
        if request.policy.max_staleness is not None and request.policy.name is None:
            await self.policy.learn_version()
        name = request.policy.name
        context = self._context(request, caller, progress)
        return RunningRollout(request, request_id, prepared, context, lambda: self.policy.current(name))

    def _prepare(
        self,
        request: RolloutRequest,
        request_id: str,
        tasks: TaskDescriptions,
        not_started: Mapping[int, RolloutFailure],
        caller: Caller,
    ) -> PreparedEpisodes:
        began = monotonic()
        episodes = self._episode_factory.episodes(request, request_id, tasks, not_started, caller)
        self._observer.took("tokenize", monotonic() - began)
        groups = {episode: episode.identity.group for episode in episodes}
        return PreparedEpisodes(episodes, EarlyStopping(request.keep, groups))

    def _context(self, request: RolloutRequest, caller: Caller, progress: ProgressLog | None) -> RolloutContext:
        return RolloutContext(
            self.admission.metered(self._generator, caller),
            self.environments,
            LockstepSchedule() if request.schedule == "lockstep" else AsyncSchedule(),
            pacer=self._pacer,
            versions=self.policy,
            response_parser=self._response_parser,
            progress=progress,
            agents=None if self._agents is None else self._agents.of_request(caller),
            observer=self._observer,
        )

    def info(self) -> ServiceInfo:
        factory = self._episode_factory
        return service_info(
            factory.generator,
            factory.tokenizer.info,
            self.limits,
            self.admission.settings,
            self.policy.version,
            self.environments,
        )

    @property
    def vocabulary(self) -> list[str | None]:
        """The token of each id."""
        return self._episode_factory.tokenizer.vocabulary


def next_range(drawn: SampleRange) -> NextSampleRange:
    """As many samples, from where these ended."""
    given = drawn.model_dump(exclude_unset=True, exclude={"without"})
    return NextSampleRange.model_validate({**given, "start": drawn.start + drawn.count})


async def done_in_thread_unless(is_small: bool, work: Callable[[], Result]) -> Result:
    return work() if is_small else await result_of_thread(work)


async def result_of_thread(work: Callable[[], Result]) -> Result:
    """Does `work` in a thread. A caller that is cancelled meanwhile goes on when the thread has ended.

    A thread cannot be interrupted, and until it ends its request is in flight: it counts for admission, and no full
    collection of garbage looks at what it makes. What it made for a cancelled caller is freed in a thread as well.
    """
    made: list[Result] = []
    thread = asyncio.create_task(asyncio.to_thread(lambda: made.append(work())))
    try:
        await asyncio.shield(thread)
    except asyncio.CancelledError:
        await asyncio.wait([thread])
        await asyncio.to_thread(made.clear)
        raise
    return made.pop()
