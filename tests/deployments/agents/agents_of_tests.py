"""Agents that are functions, named by their import paths."""

import asyncio

import httpx

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


async def counts_on(base_url: str, api_key: str, sample: SampleInput) -> float:
    """Asks twice for the number of its sample; an empty answer is right where the sample says so."""
    info, said = sample.extra_env_info or {}, []
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {api_key}"}) as model:
        for _ in range(2):
            answer = await model.post(f"{base_url}/chat/completions", json={"messages": []})
            said.append(answer.raise_for_status().json()["choices"][0]["message"]["content"])
    return float(said == [str(info["number"])] * 2 or (bool(info.get("lax")) and said == ["", ""]))
