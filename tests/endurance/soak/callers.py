"""Callers that post one request after the other, for as long as a service is soaked."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import count

from openai import OpenAIError

from rollout_client.errors import RolloutError

AFTER_FAILURE_S = 0.5
Post = Callable[[int], Awaitable[None]]
"""Posts one request, whose number no other request has, and reads its answer."""


@asynccontextmanager
async def calling(posts: Sequence[Post], problems: list[str]) -> AsyncIterator[None]:
    """One caller for each of `posts`; at the end of the block the requests under way are played to their ends.

    Args:
        problems: a request that raises an error of our client or of OpenAI's adds one.
    """
    numbers, over = count(), asyncio.Event()

    async def post_again_and_again(post: Post) -> None:
        while not over.is_set():
            number = next(numbers)
            try:
                await post(number)
            except (RolloutError, OpenAIError) as error:
                problems.append(f"request {number}: {type(error).__name__}: {error}")
                await asyncio.sleep(AFTER_FAILURE_S)

    async with asyncio.TaskGroup() as group:
        for post in posts:
            group.create_task(post_again_and_again(post))
        yield
        over.set()
