"""One request without HTTP: validates it, waits for its weights, plays it, computes its metrics."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from deployments.protocols.chat import ResponseParser
from deployments.protocols.generation import Environment, Generator
from deployments.protocols.replicas import GeneratorDescription
from rollout_client.contract.info import ServiceInfo
from rollout_client.contract.rollouts import RolloutRequest, SampleResult
from service.access.keys import ANYBODY, Caller
from service.admission.admission import Admission
from service.images.request_images import RequestImages, bytes_of_files, refuse_images
from service.remote.policy import RemotePolicy
from service.rollout_requests.body_parser import BodyParser
from service.rollout_requests.episode_maker import EpisodeMaker, done_in_thread_unless
from service.rollout_requests.episodes import EpisodeFactory, request_context
from service.rollout_requests.forks import RolloutRecords, take_forks
from service.rollout_requests.garbage_collection import PacedCollections
from service.rollout_requests.parsing import BodyBounds
from service.rollout_requests.running_rollout import PreparedEpisodes, RunningRollout, free_beside_others
from service.rollout_requests.sample_preparation import refuse_bad_extra_env_info, task_descriptions
from service.rollout_requests.service_status import service_info
from service.rollout_requests.task_samples import TaskSampler
from service.rollout_requests.validation import refuse_large_echo
from service.rollouts.agent_episode import Agents
from service.rollouts.episode import Episode
from service.rollouts.images import ImageReader
from service.rollouts.loop import RolloutContext
from service.rollouts.pacing import LoopPacer
from service.rollouts.progress import UNOBSERVED, ProgressLog, RolloutObserver
from service.rollouts.schedule import AsyncSchedule, LockstepSchedule
from service.settings import RequestLimits

MOST_BYTES_PREPARED_INLINE = 2**12
MOST_GENERATIONS_PREPARED_INLINE = 16
"""Rendering and tokenizing a request within these bounds takes 1 to 2 ms, little more than a call in a thread costs."""


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
        agents_of: Callable[[Caller], Agents] | None = None,
        images: RequestImages | None = None,
        records: RolloutRecords | None = None,
    ) -> None:
        """Plays the tasks that have agents with those of each caller; reports the progress of rollouts to `observer`.

        Args:
            images: `None` where requests may show none.
            records: those of rollouts that have ended; `None` where none are kept.
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
        self._agents_of = agents_of
        self._request_images = images
        self._images = ImageReader(generator)
        self._records = records

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
            body_bytes += await self.task_sampler.fill(request, self.body_parser, self.limits, hold)
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
        is_small &= request.num_generations <= MOST_GENERATIONS_PREPARED_INLINE
        await done_in_thread_unless(is_small, partial(self._episode_factory.refuse_invalid, request, tasks))
        await refuse_bad_extra_env_info(request, request_id, self.environments)
        request = await self._with_named_images(request, caller)
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

    def _note_end(self, episode: Episode, result: SampleResult, ago_s: float) -> None:
        self._observer.ended(result, episode.versions.at_end)
        if self._records is not None:
            self._records.note(episode, result, ago_s)

    async def _with_named_images(self, request: RolloutRequest, caller: Caller) -> RolloutRequest:
        """Raises what `RequestImages.named` raises. Of a request that had others, the samples move to the copy."""
        if self._request_images is None:
            await refuse_images(request)
            return request
        named = await self._request_images.named(request, caller)
        if named is not request:
            # Its sender may hold it until the answer is whole, and with it megabytes of each image.
            samples, request.samples = request.samples, []
            await free_beside_others(samples)
        return named

    async def _prepared(self, maker: EpisodeMaker) -> PreparedEpisodes:
        groups = maker.groups_to_select()
        if groups is None:
            return PreparedEpisodes(await maker.episodes(range(len(maker.request.samples))))
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
            agents=None if self._agents_of is None else self._agents_of(caller),
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
