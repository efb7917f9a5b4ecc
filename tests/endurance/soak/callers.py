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


class Callers:
    """One caller for each of `posts`.

    Args:
        problems: a request that raises an error of our client or of OpenAI's adds one.
    """

    def __init__(self, posts: Sequence[Post], problems: list[str]) -> None:
        self._posts = posts
        self._problems = problems
        self._numbers = count()
        self._is_over = False

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """They go on for the length of the block; at its end the requests under way are played to their ends."""
        callers = [asyncio.create_task(self._post_again_and_again(post)) for post in self._posts]
        try:
            yield
        except BaseException:
            for caller in callers:
                caller.cancel()
            raise
        self._is_over = True
        await asyncio.gather(*callers)

    async def _post_again_and_again(self, post: Post) -> None:
        while not self._is_over:
            number = next(self._numbers)
            try:
                await post(number)
            except (RolloutError, OpenAIError) as error:
                self._problems.append(f"request {number}: {type(error).__name__}: {error}")
                await asyncio.sleep(AFTER_FAILURE_S)
