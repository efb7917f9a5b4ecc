"""How long a service goes on with work that nobody waits for any more."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from time import monotonic
from typing import Any

import httpx
from ray import serve

BEGUN_WITHIN_S = 60.0
POLL_S = 0.02
Abandon = Callable[[], Awaitable[float]]
"""Abandons the work. Returns the moment before, in seconds of `monotonic`."""
Way = Callable[[httpx.AsyncClient], Awaitable[Abandon]]
"""Posts the work, and returns when the service may have begun with it."""


class NotBegun(Exception):
    """Not all of the work was under way in time."""


@dataclass(frozen=True)
class Work:
    """Ways to abandon the same work, by name, and how to see that it is under way."""

    ways: dict[str, Way]
    in_service: Callable[[], tuple[int, ...]]
    """Of what the service has under way; zeros when it has nothing."""
    begun: tuple[int, ...]
    """What that is when all of the work is."""

    async def seconds_until_given_up(self, url: str, way: Way, within_s: float) -> float:
        """Has the work begun and abandoned, and returns how long the service went on with any of it.

        Raises:
            NotBegun: not all of it began.
            TimeoutError: not all of it was given up within `within_s` seconds.
        """
        async with httpx.AsyncClient(base_url=url, timeout=BEGUN_WITHIN_S) as client:
            abandon = await way(client)
            try:
                await self._until_in_service(self.begun, BEGUN_WITHIN_S)
            except TimeoutError as error:
                there = await asyncio.to_thread(self.in_service)
                with suppress(httpx.HTTPError):
                    await abandon()
                raise NotBegun(f"{there} of {self.begun} was under way") from error
            began = await abandon()
            await self._until_in_service((0,) * len(self.begun), within_s)
            return monotonic() - began

    async def _until_in_service(self, expected: tuple[int, ...], within_s: float) -> None:
        """Raises `TimeoutError`."""
        async with asyncio.timeout(within_s):
            while await asyncio.to_thread(self.in_service) != expected:
                await asyncio.sleep(POLL_S)


def generations() -> int:
    """Those that run or wait in the engine of the one generator replica."""
    generators: Any = serve.get_deployment_handle("Generator", app_name="rollout")
    ongoing: int = generators.ongoing_generations.remote().result()
    return ongoing


async def streams_left(
    client: httpx.AsyncClient, path: str, bodies: Iterable[Any], headers: dict[str, str] | None = None
) -> Abandon:
    """Posts the bodies, each for a stream. Whoever abandons them closes their connections after they have begun."""
    streams = AsyncExitStack()
    for body in bodies:
        answer = await streams.enter_async_context(client.stream("POST", path, json=body, headers=headers))
        answer.raise_for_status()

    async def abandon() -> float:
        began = monotonic()
        await streams.aclose()
        return began

    return abandon


async def cancelled(calls: "list[asyncio.Task[Any]]") -> float:
    """Closes the connections of these calls. Returns the moment before."""
    began = monotonic()
    for call in calls:
        call.cancel()
    await asyncio.wait(calls)
    return began
