"""One request without HTTP: validates it, waits for its weights, plays it, computes its metrics."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, TypeVar

from deployments.failures import RolloutFailure
from deployments.protocols.chat import ResponseParser, images_of
from deployments.protocols.environments import TaskDescription
from deployments.protocols.generation import Environment, Generator
from deployments.protocols.images import ImageTokens
from rollout_client.contract.rollouts import RolloutRequest, SampleResult
from service.access.keys import ANYBODY, Caller
from service.admission.admission import Admission
from service.images.request_images import RequestImages, bytes_of_files, with_names
from service.remote.policy import RemotePolicy
from service.rollout_requests.body_parser import BodyParser
from service.rollout_requests.episodes import EpisodeFactory, ValidRequest
from service.rollout_requests.forks import take_forks
from service.rollout_requests.garbage_collection import PacedCollections
from service.rollout_requests.parsing import BodyBounds
from service.rollout_requests.running_rollout import RunningRollout, free_beside_others
from service.rollout_requests.sample_preparation import (
    outcome_of,
    refuse_bad_extra_env_info,
    start_samples,
    task_descriptions,
    tasks_with_start,
)
from service.rollout_requests.task_samples import TaskSampler
from service.rollout_requests.validation import refuse_large_echo
from service.rollouts.agent_episode import Agents
from service.rollouts.episode import Episode
from service.rollouts.group_selection import GroupSelection, fault_of
from service.rollouts.loop import RolloutContext
from service.rollouts.messages import ImageReader
from service.rollouts.pacing import LockstepSchedule, LoopPacer, Schedule
from service.rollouts.progress import UNOBSERVED, ProgressLog, RolloutObserver
from service.rollouts.retries import RetryBudget
from service.rollouts.selected_groups import DrawGroups, GroupsToSelect
from service.settings import RequestLimits

if TYPE_CHECKING:
    from service.rollout_records.recorder import RolloutRecorder

MOST_BYTES_PREPARED_INLINE = 2**12
MOST_GENERATIONS_PREPARED_INLINE = 16
"""Rendering and tokenizing a request within these bounds takes 1 to 2 ms, little more than a call in a thread costs."""
Result = TypeVar("Result")


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
        records: "RolloutRecorder | None" = None,
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
        self.collections = PacedCollections()
        self._generator = generator
        self.episode_factory = replace(episode_factory, keeps_states=records is not None)
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
            self.episode_factory.tokenizer,
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
        echoed_bytes = body_bytes // max(1, len(request.samples))
        refuse_large_echo(request, body_bytes - await bytes_of_files(request), self.limits)
        tasks = await task_descriptions(request, request_id, self.environments)
        described = {name: task for name, task in tasks.items() if isinstance(task, TaskDescription)}
        certificates = {name: task.certificate for name, task in described.items() if task.certificate}
        is_small = body_bytes <= MOST_BYTES_PREPARED_INLINE
        is_small &= request.num_generations <= MOST_GENERATIONS_PREPARED_INLINE
        await _done_in_thread_unless(is_small, partial(self.episode_factory.refuse_invalid, request, tasks))
        await refuse_bad_extra_env_info(request, request_id, self.environments)
        request = await self._with_named_images(request, caller)
        valid = ValidRequest.of(request.model_copy(), request_id, tasks, caller)
        draw = partial(self._drawn, valid, progress, is_small)
        selected = _groups_to_select(valid.request, draw)
        if selected is None:
            places = range(len(request.samples))
        else:
            places = selected.selection.draw(0 if progress is None else progress.begun_groups)
        first = await draw(places)
        samples, request.samples = request.samples, []
        if selected is None:
            # Unused from here on; at the end of the request they would be freed at once.
            valid.request.samples = []
            await free_beside_others(samples)
        await self.policy.wait_for_version(request.policy)
        if request.policy.max_staleness is not None and request.policy.name is None:
            await self.policy.learn_version()
        return RunningRollout(
            valid.request,
            request_id,
            first,
            selected,
            self._context(request, caller, progress),
            partial(self.policy.current, request.policy.name),
            self._note_end,
            echoed_bytes,
            certificates,
        )

    async def _drawn(
        self, valid: ValidRequest, progress: ProgressLog | None, is_small: bool, places: range
    ) -> list[Episode]:
        """The episodes of the samples at these places, which their environments have started where they do so.

        Those that another process has played are at the turns that it has recorded.
        """
        not_started: dict[int, RolloutFailure] = {}
        if with_start := tasks_with_start(valid.tasks):
            request, request_id, owner = valid.request, valid.request_id, valid.share.key
            not_started = await start_samples(
                request, request_id, with_start, self.environments, progress, places, owner
            )
        images: dict[str, ImageTokens] = {}
        not_started |= await self._unknown_images(valid, places, images)

        def made() -> list[Episode]:
            began = monotonic()
            episodes = self.episode_factory.groups(valid, places, not_started, images)
            self._observer.took("tokenize", monotonic() - began)
            return episodes

        episodes = await _done_in_thread_unless(is_small, made)
        if progress is not None:
            await _done_in_thread_unless(is_small, partial(progress.restore, episodes))
        return episodes

    async def _unknown_images(
        self, valid: ValidRequest, places: range, images: dict[str, ImageTokens]
    ) -> dict[int, RolloutFailure]:
        """Learns the tokens of all images of the samples; returns the failures, by place, of those that have others."""
        samples = valid.request.samples
        shown = {
            place: names
            for place in places
            if (names := [name for message in samples[place].messages or () for name in images_of(message)])
        }
        learned = await asyncio.gather(
            *(
                outcome_of(
                    partial(self._images.learn, names, images),
                    RetryBudget({"request_id": valid.request_id, "sample": place}, valid.request.retries),
                )
                for place, names in shown.items()
            )
        )
        return {place: end for place, end in zip(shown, learned, strict=True) if end is not None}

    def _note_end(self, episode: Episode, result: SampleResult, ago_s: float) -> None:
        self._observer.ended(result, episode.versions.at_end)
        if self._records is not None:
            self._records.note(episode, result, ago_s)

    async def _with_named_images(self, request: RolloutRequest, caller: Caller) -> RolloutRequest:
        """Raises what `with_names` raises. Of a request that had others, the samples move to the copy."""
        named = await with_names(self._request_images, request, caller)
        if named is not request:
            # Its sender may hold it until the answer is whole, and with it megabytes of each image.
            samples, request.samples = request.samples, []
            await free_beside_others(samples)
        return named

    def _context(self, request: RolloutRequest, caller: Caller, progress: ProgressLog | None) -> RolloutContext:
        return RolloutContext(
            self._generator,
            self.environments,
            LockstepSchedule() if request.schedule == "lockstep" else Schedule(),
            pacer=self._pacer,
            versions=self.policy,
            response_parser=self._response_parser,
            progress=progress,
            agents=None if self._agents_of is None else self._agents_of(caller),
            observer=self._observer,
            images=self._images,
        )


def _groups_to_select(request: RolloutRequest, draw: DrawGroups) -> GroupsToSelect | None:
    """The groups of a request with `keep.where`, none of which is drawn yet; `None` without it."""
    keep = request.keep
    if keep.where is None:
        return None
    assert keep.groups is not None
    selection = GroupSelection(keep.groups, len(request.samples), request.groups_at_once)
    judge = partial(fault_of, where=keep.where, full=keep.per_group or request.num_generations)
    return GroupsToSelect(keep, judge, selection, draw)


async def _done_in_thread_unless(is_small: bool, work: Callable[[], Result]) -> Result:
    """Does `work`, in a thread unless it is small. A caller that is cancelled goes on when the thread has ended.

    A thread cannot be interrupted, and until it ends its request is in flight: it counts for admission, and no full
    collection of garbage looks at what it makes. What it made for a cancelled caller is freed in a thread as well.
    """
    if is_small:
        return work()
    made: list[Result] = []
    thread = asyncio.create_task(asyncio.to_thread(lambda: made.append(work())))
    try:
        await asyncio.shield(thread)
    except asyncio.CancelledError:
        await asyncio.wait([thread])
        await asyncio.to_thread(made.clear)
        raise
    return made.pop()
