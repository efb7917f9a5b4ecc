"""Agents that are functions, named by their import paths."""

import asyncio

from rollout_client.contract.rollouts import SampleInput
from rollout_env import TemporaryFailure

SEEN: list[tuple[str, str, SampleInput]] = []
NO_FUNCTION = 3


async def rewarded(base_url: str, api_key: str, sample: SampleInput) -> float:
    SEEN.append((base_url, api_key, sample))
    return 0.5


async def silent(_base_url: str, _api_key: str, _sample: SampleInput) -> None:
    """Gives no reward."""


async def broken(_base_url: str, _api_key: str, _sample: SampleInput) -> None:
    raise ValueError("no such tool")


async def not_now(_base_url: str, _api_key: str, _sample: SampleInput) -> None:
    raise TemporaryFailure("the shop is closed")


async def endless(_base_url: str, _api_key: str, _sample: SampleInput) -> None:
    await asyncio.Event().wait()


async def worthless(_base_url: str, _api_key: str, _sample: SampleInput) -> str:
    return "good"


def plain(base_url: str, api_key: str, sample: SampleInput) -> None:
    """Is not async."""


async def of_two(base_url: str, api_key: str) -> None:
    """Takes too little."""
