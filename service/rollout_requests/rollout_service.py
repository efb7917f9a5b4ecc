"""One request without HTTP: validates it, waits for its weights, plays it, computes its metrics."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from deployments.protocols.chat import ResponseParser
from deployments.protocols.generation import Environment, Generator, GeneratorDescription
from rollout_client.contract.info import ServiceInfo
from rollout_client.contract.rollouts import RolloutRequest, RolloutSummary, SampleError, SampleInput, SampleResult
from rollout_client.contract.sample_ranges import NextSampleRange, SampleRange, following, moved_past
from service.access.keys import ANYBODY, Caller
from service.admission.admission import Admission
from service.agents.runs import AgentRuns
from service.images.request_images import RequestImages, bytes_of_files, refuse_images
from service.remote.policy import RemotePolicy
from service.rollout_requests.body_parser import BodyParser
from service.rollout_requests.episode_maker import EpisodeMaker, done_in_thread_unless
from service.rollout_requests.episodes import EpisodeFactory, request_context
from service.rollout_requests.forks import RolloutRecords, take_forks
from service.rollout_requests.garbage_collection import PacedCollections, free_items
from service.rollout_requests.parsing import BodyBounds
from service.rollout_requests.sample_preparation import refuse_bad_extra_env_info, task_descriptions
from service.rollout_requests.service_status import service_info
from service.rollout_requests.task_samples import TaskSampler
from service.rollout_requests.validation import refuse_large_echo
from service.rollouts.early_stopping import EarlyStopping
from service.rollouts.episode import Episode
from service.rollouts.episode_records import Echo
from service.rollouts.images import ImageReader
from service.rollouts.loop import RolloutContext, play_request
from service.rollouts.metrics import RequestMetricsAccumulator
from service.rollouts.pacing import LoopPacer
from service.rollouts.progress import UNOBSERVED, ProgressLog, RolloutObserver
from service.rollouts.schedule import AsyncSchedule, LockstepSchedule
from service.rollouts.selected_groups import GroupsToSelect, play_selected_groups
from service.settings import RequestLimits

MOST_BYTES_PREPARED_INLINE = 2**12
MOST_GENERATIONS_PREPARED_INLINE = 16
"""Rendering and tokenizing a request within these bounds takes 1 to 2 ms, little more than a call in a thread costs."""
MOST_SAMPLES_FREED_INLINE = 512
EndedRollout = tuple[int, SampleResult, Echo | None]


class SampleFailed(Exception):
    """A sample failed in a request that has `on_error: fail`. `sample_position` is its place in the request."""

    def __init__(self, sample_position: int, generation_index: int, error: SampleError) -> None:
        self.sample_position = sample_position
        self.kind = error.kind
        super().__init__(f"generation {generation_index} failed: {error.message}")


@dataclass(frozen=True, slots=True)
class PreparedEpisodes:
    """The episodes that are played first: all of them, unless groups are selected."""

    episodes: Sequence[Episode]
    groups: GroupsToSelect | None = None
    """Set for a request with `keep.where` or a range of `num_generations`."""
    samples: list[SampleInput] = field(default_factory=list)
    """Those from which groups are drawn. Thousands are freed in a thread at the end."""


class RunningRollout:
    """One request that is played while it is iterated. Yields (position in the response, result, echo) as samples end.

    Guarantees: every sample is yielded exactly once; nothing is started before the first iteration, so one that is
    never iterated needs no closing; after `aclose`, no call of the request is under way.
    """

    counted = 0
    """Rollouts in the summary so far: those of groups that were dropped are in it."""

    def __init__(
        self,
        request: RolloutRequest,
        request_id: str,
        prepared: PreparedEpisodes,
        context: RolloutContext,
        current_version: Callable[[], int | None],
        note_end: Callable[[Episode, SampleResult, int | None], None],
    ) -> None:
        self.request_id = request_id
        self._request = request
        self._prepared: PreparedEpisodes | None = prepared
        self._selection = None if prepared.groups is None else prepared.groups.selection
        self._is_selecting = request.keep.where is not None
        self._kept: list[int] = []
        """The places of the groups that were selected so far."""
        self._sizes: dict[int, int] = {}
        """By group of the answer, where rewards decide them."""
        self._judged_rollouts = 0
        self._context = context
        self._current_version = current_version
        self._report_end = note_end
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
        return RolloutSummary(
            request_id=self.request_id,
            metrics=self._metrics.metrics(),
            policy=self._metrics.policy(self._current_version()),
            **self._optional_fields(),
        )

    def _optional_fields(self) -> dict[str, Any]:
        drawn, selection, fields = self._request.samples_from, self._selection, dict[str, Any]()
        moved: Iterable[SampleRange] = map(following, drawn)
        if selection is not None:
            counted = {"rollouts": self._judged_rollouts} if self._request.generation_range else {}
            fields["groups"] = selection.counts.model_copy(update=counted)
            if drawn:
                moved = moved_past(drawn, selection.decided)
        if drawn:
            fields["next_samples_from"] = next_ranges(moved)
        return fields

    def place_of(self, group: int) -> int:
        """The place of a group of the answer among the samples that were drawn."""
        return self._kept[group] if self._is_selecting else group

    def size_of(self, group: int) -> int:
        """How many rollouts a group of the answer has, one of which has been yielded."""
        return self._sizes.get(group, self._request.group_size)

    @property
    def selected(self) -> tuple[int, int] | None:
        """How many samples were drawn and judged, and how many groups kept; `None` if no groups are selected."""
        if self._selection is None or not self._is_selecting:
            return None
        return self._selection.counts.drawn, self._selection.counts.kept

    def final_summary(self) -> RolloutSummary:
        """The `summary` after the last sample, in a thread; frees what it was computed from there."""
        summary = self.summary
        self._metrics.free_samples()
        return summary

    async def _play(self) -> AsyncGenerator[EndedRollout, None]:
        # Only the loop refers to the episodes: each is freed when it has ended, not thousands at once at the end.
        prepared, self._prepared = self._prepared, None
        assert prepared is not None
        if prepared.groups is not None:
            async with aclosing(self._play_selected(prepared.episodes, prepared.groups)) as selected:
                async for ended_rollout in selected:
                    yield ended_rollout
            await free_beside_others(prepared.samples)
            return
        groups = {episode: episode.identity.group for episode in prepared.episodes}
        early_stopping = EarlyStopping(self._request.keep, groups)
        playing = play_request(prepared.episodes, self._context, early_stopping, self._request.deadline_s)
        del prepared, groups, early_stopping
        async with aclosing(playing) as ended:
            async for episode in ended:
                result = episode.result()
                self._note_end(episode, result)
                self._count(episode, result)
                yield episode.identity.position, result, episode.start.echo
                self._raise_failure(episode)

    async def _play_selected(
        self, first: Sequence[Episode], groups: GroupsToSelect
    ) -> AsyncGenerator[EndedRollout, None]:
        """The rollouts of the groups that are kept. Positions are those of the answer, if its groups had all the same
        size."""
        size = self._request.group_size
        playing = play_selected_groups(first, groups, self._context, self._note_selected, self._request.deadline_s)
        async with aclosing(playing) as judged:
            async for group in judged:
                self._judged_rollouts += len(group.rollouts)
                for episode, result in group.rollouts:
                    self._count(episode, result)
                if group.is_kept:
                    self._kept.append(group.place)
                    place = len(self._kept) - 1 if self._is_selecting else group.place
                    if self._request.generation_range:
                        self._sizes[place] = len(group.rollouts)
                    for index, (episode, result) in enumerate(group.rollouts):
                        if self._request.generation_range:
                            result.group_size = len(group.rollouts)
                        yield size * place + index, result, episode.start.echo

    def _note_end(self, episode: Episode, result: SampleResult) -> None:
        if self._context.progress is not None:
            self._context.progress.ended(episode)
        self._report_end(episode, result, self._current_version())
        self.observer.ended(result, episode.versions.at_end)

    def _note_selected(self, episode: Episode, result: SampleResult) -> None:
        self._note_end(episode, result)
        self._raise_failure(episode)

    def _count(self, episode: Episode, result: SampleResult) -> None:
        self.counted += 1
        self._metrics.add(result, episode.versions.at_end, episode.metrics.tokens_by_replica)

    def _raise_failure(self, episode: Episode) -> None:
        if episode.error is not None and self._request.on_error == "fail":
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
        images: RequestImages | None = None,
        records: RolloutRecords | None = None,
        sign: Callable[[SampleResult], None] | None = None,
    ) -> None:
        """Plays with `agents` the tasks that have agents; reports the progress of rollouts to `observer`.

        Args:
            images: `None` where requests may show none.
            records: those of rollouts that have ended; `None` where none are kept.
            sign: adds the service's signature to a result; `None` where results are not signed.
        """
        self.policy = policy
        self.admission = admission
        self.environments = environments
        self.limits = limits
        self.task_sampler = task_sampler
        self.body_parser = BodyParser(BodyBounds(limits.max_rollouts_per_request, limits.max_sample_bytes))
        self.collections = PacedCollections(lambda: admission.in_flight.rollouts)
        self._generator = generator
        self._episode_factory = replace(episode_factory, keeps_states=records is not None)
        self._pacer = LoopPacer()
        self._response_parser = response_parser
        self._observer = observer
        self._agents = agents
        self._request_images = images
        self._images = ImageReader(generator)
        self._records = records
        self._sign = sign

    async def take_samples(
        self,
        request: RolloutRequest,
        hold: Callable[[int], None],
        caller: Caller = ANYBODY,
        body_bytes: int = 0,
        progress: ProgressLog | None = None,
    ) -> int:
        """Puts the samples of `samples_from`, and the logs of forks, into the request.

        Args:
            hold: called with the bytes so far, before more are read.
            body_bytes: of the request before.
            progress: as for `rollout`.

        Returns:
            The bytes of the request with them.

        Raises:
            RequestProblem: what `TaskSampler.fill` and `take_forks` raise, as all other failures.
        """
        if request.samples_from:
            version = self.policy.current(request.policy.name)
            body_bytes += await self.task_sampler.fill(request, self.body_parser, self.limits, hold, version)
        return body_bytes + await take_forks(
            request,
            self._records,
            caller,
            self._episode_factory.tokenizer,
            self.limits.max_body_bytes,
            lambda size: hold(body_bytes + size),
            progress,
        )

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
            RequestProblem: the request is not valid for this service's tasks, model and limits, an environment does
                not accept the fields of a sample, or an image cannot be taken.
            ImagesFull: there is no room for its images.
            PolicyNotCurrent: the weights that it demands are not current, and do not become current in time.
            PolicyUnknown: it names a policy that does not exist.
            PolicyStoreLost: the policy store does not answer.
        """
        refuse_large_echo(request, body_bytes - await bytes_of_files(request), self.limits)
        tasks = await task_descriptions(request, request_id, self.environments)
        is_small = body_bytes <= MOST_BYTES_PREPARED_INLINE
        is_small &= request.group_size <= MOST_GENERATIONS_PREPARED_INLINE
        await done_in_thread_unless(is_small, partial(self._episode_factory.refuse_invalid, request, tasks))
        await refuse_bad_extra_env_info(request, request_id, self.environments)
        request = await self._with_named_images(request, caller, progress)
        maker = EpisodeMaker(
            request.model_copy(),
            request_context(request, request_id, caller),
            tasks,
            self._episode_factory,
            self.environments,
            self._observer,
            progress,
            self._images,
            is_small,
        )
        prepared = await self._prepared(maker)
        samples, request.samples = request.samples, []
        if prepared.groups is None:
            # Unused from here on; at the end of the request they would be freed at once.
            await free_beside_others(samples)
        await self.policy.wait_for_version(request.policy)
        if request.policy.max_staleness is not None and request.policy.name is None:
            await self.policy.learn_version()
        name = request.policy.name
        context = self._context(request, caller, progress)
        current = partial(self.policy.current, name)
        return RunningRollout(request, request_id, prepared, context, current, self._note_end)

    def _note_end(self, episode: Episode, result: SampleResult, version: int | None) -> None:
        self.task_sampler.note(result, episode.start.bounds.policy, version)
        if self._sign is not None:
            self._sign(result)
        if self._records is not None:
            self._records.note(episode, result)

    async def _with_named_images(
        self, request: RolloutRequest, caller: Caller, progress: ProgressLog | None
    ) -> RolloutRequest:
        """Raises what `RequestImages.named` raises. Of a request that had others, the samples move to the copy."""
        if self._request_images is None:
            await refuse_images(request)
            return request
        named = await self._request_images.named(request, caller, progress)
        if named is not request:
            # Its sender may hold it until the answer is whole, and with it megabytes of each image.
            samples, request.samples = request.samples, []
            await free_beside_others(samples)
        return named

    async def _prepared(self, maker: EpisodeMaker) -> PreparedEpisodes:
        if maker.request.keep.where is None and maker.request.generation_range is None:
            return PreparedEpisodes(await maker.episodes(range(len(maker.request.samples))))
        groups = maker.groups_to_select()
        begun = 0 if maker.progress is None else maker.progress.begun_groups
        first = await maker.episodes(groups.selection.draw(begun))
        return PreparedEpisodes(first, groups, maker.request.samples)

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
            images=self._images,
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
    def generator(self) -> GeneratorDescription:
        """The limits of its engines."""
        return self._episode_factory.generator

    @property
    def vocabulary(self) -> list[str | None]:
        """The token of each id."""
        return self._episode_factory.tokenizer.vocabulary


async def free_beside_others(samples: list[SampleInput]) -> None:
    """Empties the list, a long one in a thread."""
    if len(samples) > MOST_SAMPLES_FREED_INLINE:
        await asyncio.to_thread(free_items, samples)


def next_ranges(moved: Iterable[SampleRange]) -> list[NextSampleRange]:
    """The ranges with the fields that were given; an empty `without` is left out."""
    given = (drawn.model_dump(exclude_unset=True, exclude=set() if drawn.without else {"without"}) for drawn in moved)
    return [NextSampleRange(**fields) for fields in given]
