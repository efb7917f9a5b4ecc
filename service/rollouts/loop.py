"""The rollout: plain asyncio over the two protocols. One turn, one sample, one request.

Guarantees: every episode that goes in comes out, exactly once, in whatever state it ended; one that fails carries its
error and leaves its siblings alone; what is cut off (deadline, enough is done) keeps its log and can be posted back;
cancelling a request cancels every call it has under way.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, wait_exponential_jitter

from deployments.failures import RolloutFailure, TurnTimedOut, failure_of
from deployments.protocols import Environment, Generator
from rollout_client.contract import SampleError
from service.rollouts.early_stopping import EarlyStopping
from service.rollouts.episode import CutOff, Episode
from service.rollouts.schedule import Schedule

FIRST_RETRY_AFTER_S = 0.1
LAST_RETRY_AFTER_S = 5.0
Result = TypeVar("Result")
Call = Callable[[], Coroutine[Any, Any, Result]]


@dataclass(frozen=True, slots=True)
class RolloutContext:
    """What the samples of a request play with."""

    generator: Generator
    environments: Mapping[str, Environment]
    schedule: Schedule
    generation_timeout_s: float | None = None
    step_timeout_s: float | None = None


async def play_turn(episode: Episode, context: RolloutContext) -> None:
    """One generation and one environment step, as far as they are due: a log may end between the two."""
    begins_with_the_step = episode.step_is_due
    await context.schedule.phase()
    if not begins_with_the_step:
        await play_generation(episode, context)
    if not episode.done:
        await context.schedule.phase()
        await play_step(episode, context)


async def play_generation(episode: Episode, context: RolloutContext) -> None:
    request = episode.next_generation()
    if request is not None:
        call = with_timeout(context.generation_timeout_s, lambda: context.generator.generate(request), "The generation")
        episode.add_generation(await with_retries(call, episode))


async def play_step(episode: Episode, context: RolloutContext) -> None:
    request = episode.step_request()
    environment = context.environments[episode.identity.task_name]
    call = with_timeout(context.step_timeout_s, lambda: environment.step(request), "The environment's step")
    episode.add_outcome(await with_retries(call, episode))


async def play_sample(episode: Episode, context: RolloutContext) -> Episode:
    """Plays until the episode is over; whatever breaks becomes its error."""
    try:
        while not episode.done:
            await play_turn(episode, context)
    except Exception as error:  # noqa: BLE001 - a failed sample is data
        episode.fail(failure_of(error))
    finally:
        context.schedule.leave()
        context.generator.release(episode.identity.rollout_id)
    return episode


async def play_request(
    episodes: Sequence[Episode],
    context: RolloutContext,
    early_stopping: EarlyStopping[Episode],
    deadline_s: float | None = None,
) -> AsyncGenerator[Episode, None]:
    """Plays all episodes at once, yielding each when it is over; closing the iterator cancels the rest.

    Those that nobody needs any more end as `cancelled`, those that run at the deadline as `deadline`, at that moment,
    however slowly the iterator is read.
    """
    running = RunningEpisodes(episodes, context, early_stopping)
    if deadline_s is not None:
        running.cut_off_after(deadline_s)
    try:
        for _ in episodes:
            yield await running.ended.get()
    finally:
        await running.stop()


class RunningEpisodes:
    """The samples of one request under way; each is put into `ended` exactly once, when it is."""

    def __init__(
        self, episodes: Sequence[Episode], context: RolloutContext, early_stopping: EarlyStopping[Episode]
    ) -> None:
        self.ended: asyncio.Queue[Episode] = asyncio.Queue()
        self._context = context
        self._early_stopping = early_stopping
        self._deadline: asyncio.TimerHandle | None = None
        for _ in episodes:
            context.schedule.join()
        self._tasks = {episode: asyncio.create_task(self._play(episode)) for episode in episodes}

    async def _play(self, episode: Episode) -> None:
        try:
            await play_sample(episode, self._context)
        except asyncio.CancelledError:
            # Ours, if it was cut off; else somebody below gave the call up, which is no reason to lose the sample.
            episode.fail(SampleError(kind="internal", message="A call of the sample was cancelled.", retryable=True))
        if not episode.was_cut_off:
            self.ended.put_nowait(episode)
            unneeded = self._early_stopping.after(episode, without_error=episode.status != "error")
            self.cut_off(unneeded, "cancelled")

    def cut_off(self, episodes: Iterable[Episode], status: CutOff) -> None:
        """Ends those of `episodes` that are not over yet."""
        for episode in episodes:
            if not episode.done:
                episode.cut_off(status)
                self._tasks[episode].cancel()
                self.ended.put_nowait(episode)

    def cut_off_after(self, deadline_s: float) -> None:
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(deadline_s, self.cut_off, self._tasks, "deadline")

    async def stop(self) -> None:
        if self._deadline is not None:
            # A distant deadline would keep every sample of a finished request in memory until then.
            self._deadline.cancel()
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)


def with_timeout(seconds: float | None, call: Call[Result], what: str) -> Call[Result]:
    """The call, raising `TurnTimedOut` where it takes longer than `seconds`."""

    async def timed() -> Result:
        try:
            async with asyncio.timeout(seconds) as limit:
                return await call()
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise TurnTimedOut(f"{what} took longer than {seconds:g} s.") from error

    return timed


async def with_retries(call: Call[Result], episode: Episode) -> Result:
    """Calls again after a failure of the fleet, with growing pauses, as long as the sample's budget lasts."""
    try:
        # Nearly always enough, and then what follows would cost more than the rest of the turn.
        return await call()
    except RolloutFailure as failure:
        first_failure = failure

    def is_over(attempt: RetryCallState) -> bool:
        failure = attempt.outcome and attempt.outcome.exception()
        return getattr(failure, "costs_a_retry", True) and not episode.take_retry()

    attempts = AsyncRetrying(
        retry=retry_if_exception(lambda error: isinstance(error, RolloutFailure) and error.retryable),
        stop=is_over,
        wait=wait_exponential_jitter(multiplier=FIRST_RETRY_AFTER_S, max=LAST_RETRY_AFTER_S),
        reraise=True,
    )
    return await attempts(after_failure(first_failure, call))


def after_failure(failure: RolloutFailure, call: Call[Result]) -> Call[Result]:
    """The call, as if it had not been tried yet: its first try fails by `failure`."""
    known = [failure]

    async def next_try() -> Result:
        if known:
            raise known.pop()
        return await call()

    return next_try
