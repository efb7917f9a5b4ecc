"""The rollout: plain asyncio over the two protocols. One turn, one sample, one request.

Guarantees: every episode that goes in comes out, exactly once, in whatever state it ended; one that fails carries its
error and leaves its siblings alone; cancelling a request cancels every call it has under way.
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence

from deployments.failures import failure_of
from deployments.protocols import Environment, Generator
from service.episode import Episode


async def play_turn(episode: Episode, generator: Generator, environment: Environment) -> None:
    """One generation and, unless it ended the sample, one environment step."""
    request = episode.next_generation()
    if request is None:
        return
    episode.add_generation(await generator.generate(request))
    if not episode.over:
        episode.add_outcome(await environment.step(episode.step_request()))


async def play_sample(episode: Episode, generator: Generator, environment: Environment) -> Episode:
    """Plays until the episode is over; whatever breaks becomes its error."""
    while not episode.over:
        try:
            await play_turn(episode, generator, environment)
        except Exception as error:  # noqa: BLE001 - a failed sample is data
            episode.fail(failure_of(error))
    return episode


async def play_request(
    episodes: Sequence[Episode], generator: Generator, environments: Mapping[str, Environment]
) -> AsyncGenerator[Episode, None]:
    """Plays all episodes at once, yielding each when it is over; closing the iterator cancels the rest."""
    tasks = [
        asyncio.create_task(play_sample(episode, generator, environments[episode.identity.task_name]))
        for episode in episodes
    ]
    try:
        for next_over in asyncio.as_completed(tasks):
            yield await next_over
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
