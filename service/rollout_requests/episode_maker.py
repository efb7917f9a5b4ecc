"""Makes the episodes of a valid request when they are drawn: all at once, or group after group for `keep.where`."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import TypeVar

from deployments.failures import RolloutFailure
from deployments.protocols.chat import images_of
from deployments.protocols.generation import Environment
from deployments.protocols.images import ImageTokens
from rollout_client.contract.rollouts import RolloutRequest
from service.rollout_requests.episodes import EpisodeFactory, RequestContext
from service.rollout_requests.sample_preparation import TaskDescriptions, start_samples, tasks_with_start
from service.rollouts.episode import Episode
from service.rollouts.group_selection import GroupSelection, fault_of
from service.rollouts.images import ImageReader
from service.rollouts.progress import ProgressLog, RolloutObserver
from service.rollouts.retries import RetryBudget, with_retries
from service.rollouts.selected_groups import GroupsToSelect

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class EpisodeMaker:
    """Makes the episodes of one request, each group once."""

    request: RolloutRequest
    context: RequestContext
    tasks: TaskDescriptions
    factory: EpisodeFactory
    environments: Mapping[str, Environment]
    observer: RolloutObserver
    progress: ProgressLog | None
    images: ImageReader
    is_small: bool
    """Whether rendering and tokenizing its prompts takes little more than a call in a thread costs."""

    async def episodes(self, places: range) -> list[Episode]:
        """The episodes of the samples at these places, which their environments have started where they do so.

        Those that another process has played are at the turns that it has recorded.
        """
        not_started: dict[int, RolloutFailure] = {}
        if with_start := tasks_with_start(self.tasks):
            request_id = self.context.request_id
            not_started = await start_samples(
                self.request,
                request_id,
                with_start,
                self.environments,
                self.progress,
                places,
                self.context.share.key,
            )
        images: dict[str, ImageTokens] = {}
        not_started = {**not_started, **await self._unknown_images(places, images)}
        episodes = await done_in_thread_unless(self.is_small, partial(self._made, places, not_started, images))
        if self.progress is not None:
            await done_in_thread_unless(self.is_small, partial(self.progress.restore, episodes))
        return episodes

    async def _unknown_images(self, places: range, images: dict[str, ImageTokens]) -> dict[int, RolloutFailure]:
        """Learns the tokens of all images of the samples; returns the failures, by place, of those that have others."""
        learning: dict[int, Awaitable[None]] = {}
        for place in places:
            names = [name for message in self.request.samples[place].messages or () for name in images_of(message)]
            if names:
                learn = partial(self.images.learn, names, images)
                log_fields = {"request_id": self.context.request_id, "sample": place}
                learning[place] = with_retries(learn, RetryBudget(log_fields, self.request.retries))
        learned = await asyncio.gather(*learning.values(), return_exceptions=True)
        failures = {}
        for place, end in zip(learning, learned, strict=True):
            if isinstance(end, RolloutFailure):
                failures[place] = end
            elif end is not None:
                raise end
        return failures

    def _made(
        self, places: range, not_started: Mapping[int, RolloutFailure], images: dict[str, ImageTokens]
    ) -> list[Episode]:
        began = monotonic()
        episodes = self.factory.groups(self.request, self.context, places, self.tasks, not_started, images)
        self.observer.took("tokenize", monotonic() - began)
        return episodes

    def groups_to_select(self) -> GroupsToSelect | None:
        """The groups of a request with `keep.where`, none of which is drawn yet; `None` without it."""
        request, keep = self.request, self.request.keep
        if keep.where is None:
            return None
        assert keep.groups is not None
        selection = GroupSelection(keep.groups, len(request.samples), request.groups_at_once)
        judge = partial(fault_of, where=keep.where, full=keep.per_group or request.num_generations)
        return GroupsToSelect(keep, judge, selection, self.episodes)


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
