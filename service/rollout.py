"""The rollout: plain asyncio over the two protocols. One turn, one sample, one request.

Guarantees: every episode that goes in comes out, exactly once, in whatever state it ended; one that fails carries its
error and leaves its siblings alone; what is cut off (deadline, enough is done) keeps its log and can be posted back;
cancelling a request cancels every call it has under way.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from tenacity import AsyncRetrying, retry_if_exception, wait_exponential_jitter

from deployments.failures import RolloutFailure, TurnTimedOut, failure_of
from deployments.protocols import Environment, Generator
from service.episode import Episode
from service.keep import Stragglers
from service.schedule import Schedule

FIRST_RETRY_AFTER_S = 0.1
LAST_RETRY_AFTER_S = 5.0
Answer = TypeVar("Answer")
Call = Callable[[], Coroutine[Any, Any, Answer]]


@dataclass(frozen=True, slots=True)
class Table:
    """What the samples of a request play with."""

    generator: Generator
    environments: Mapping[str, Environment]
    schedule: Schedule
    generation_timeout_s: float | None = None
    step_timeout_s: float | None = None


async def play_turn(episode: Episode, table: Table) -> None:
    """One generation and one environment step, as far as they are due: a log may end between the two."""
    if not episode.step_is_due:
        await table.schedule.phase()
        await play_generation(episode, table)
    if not episode.over:
        await table.schedule.phase()
        await play_step(episode, table)


async def play_generation(episode: Episode, table: Table) -> None:
    request = episode.next_generation()
    if request is not None:
        call = within(table.generation_timeout_s, lambda: table.generator.generate(request), "The generation")
        episode.add_generation(await with_retries(call, episode))


async def play_step(episode: Episode, table: Table) -> None:
    request = episode.step_request()
    environment = table.environments[episode.identity.task_name]
    call = within(table.step_timeout_s, lambda: environment.step(request), "The environment's step")
    episode.add_outcome(await with_retries(call, episode))


async def play_sample(episode: Episode, table: Table) -> Episode:
    """Plays until the episode is over; whatever breaks becomes its error."""
    try:
        while not episode.over:
            await play_turn(episode, table)
    except Exception as error:  # noqa: BLE001 - a failed sample is data
        episode.fail(failure_of(error))
    finally:
        table.schedule.leave()
    return episode


async def play_request(
    episodes: Sequence[Episode], table: Table, stragglers: Stragglers[Episode], deadline_s: float | None = None
) -> AsyncGenerator[Episode, None]:
    """Plays all episodes at once, yielding each when it is over; closing the iterator cancels the rest.

    Those that nobody needs any more are yielded as `cancelled`, those that run at the deadline as `deadline`.
    """
    loop = asyncio.get_running_loop()
    deadline = None if deadline_s is None else loop.time() + deadline_s
    finished: asyncio.Queue[Episode] = asyncio.Queue()
    playing = start_all(episodes, table, finished)
    try:
        while playing:
            try:
                async with asyncio.timeout_at(deadline):
                    episode = await finished.get()
            except TimeoutError:
                for cut_off in list(playing):
                    yield end_early(cut_off, playing.pop(cut_off), "deadline")
                return
            if playing.pop(episode, None) is None:
                continue
            yield episode
            for unneeded in stragglers.after(episode, without_error=episode.status != "error") & playing.keys():
                yield end_early(unneeded, playing.pop(unneeded), "cancelled")
    finally:
        for task in playing.values():
            task.cancel()
        await asyncio.gather(*playing.values(), return_exceptions=True)


def start_all(
    episodes: Sequence[Episode], table: Table, finished: asyncio.Queue[Episode]
) -> dict[Episode, asyncio.Task[Episode]]:
    async def play(episode: Episode) -> Episode:
        await play_sample(episode, table)
        finished.put_nowait(episode)
        return episode

    for _ in episodes:
        table.schedule.join()
    return {episode: asyncio.create_task(play(episode)) for episode in episodes}


def end_early(episode: Episode, task: asyncio.Task[Episode], status: Literal["deadline", "cancelled"]) -> Episode:
    task.cancel()
    episode.cut_off(status)
    return episode


def within(seconds: float | None, call: Call[Answer], what: str) -> Call[Answer]:
    """The call, raising `TurnTimedOut` where it takes longer than `seconds`."""

    async def timed() -> Answer:
        try:
            async with asyncio.timeout(seconds):
                return await call()
        except TimeoutError as error:
            raise TurnTimedOut(f"{what} took longer than {seconds:g} s.") from error

    return timed


async def with_retries(call: Call[Answer], episode: Episode) -> Answer:
    """Calls again after a failure of the fleet, with growing pauses, as long as the sample's budget lasts."""
    attempts = AsyncRetrying(
        retry=retry_if_exception(lambda error: isinstance(error, RolloutFailure) and error.retryable),
        stop=lambda _: not episode.take_retry(),
        wait=wait_exponential_jitter(multiplier=FIRST_RETRY_AFTER_S, max=LAST_RETRY_AFTER_S),
        reraise=True,
    )
    return await attempts(call)
