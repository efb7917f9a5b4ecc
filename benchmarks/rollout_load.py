"""Load for a benchmark: posts rollouts and leaves responses unparsed, because the load shares the service's cores."""

import asyncio
import json
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import aiohttp

from benchmarks.openai_loop import JSON

TASK_NAME = "three_tokens"
NEW_TOKENS = 16
NDJSON = {**JSON, "accept": "application/x-ndjson"}
HTTP_OK = 200
LONGEST_LINE_BYTES = 2**26
"""The summary has a histogram over all generations."""


class WrongAnswer(Exception):
    """The response is not the expected one, so the measurement is void."""


@dataclass(frozen=True, slots=True)
class Played:
    """One request of many samples: seconds until its last byte, and the metrics of its summary."""

    seconds: float
    metrics: dict[str, Any]


def rollout_body(samples: int, turns: int) -> bytes:
    """A request whose samples play `turns` turns of `NEW_TOKENS` tokens each."""
    prompts = ({"role": "user", "content": f"Say something about {number}."} for number in range(samples))
    return json.dumps(
        {
            "samples": [{"task_name": TASK_NAME, "messages": [prompt]} for prompt in prompts],
            "sampling": {"max_new_tokens": NEW_TOKENS, "seed": 1},
            "max_rollout_turns": turns,
            "observation_format": "raw",
        }
    ).encode()


ONE_SAMPLE = rollout_body(samples=1, turns=1)


async def play(session: aiohttp.ClientSession, samples: int, turns: int, key: str | None = None) -> Played:
    """Plays all samples at once, in one request.

    Args:
        key: sent as `Idempotency-Key`.

    Raises:
        WrongAnswer: not all of them played all their turns.
    """
    body = rollout_body(samples, turns)
    headers = NDJSON if key is None else {**NDJSON, "idempotency-key": f'"{key}"'}
    began = perf_counter()
    async with session.post("/rollout", data=body, headers=headers, read_bufsize=LONGEST_LINE_BYTES) as response:
        async for line in response.content:
            last_line = line
    seconds = perf_counter() - began
    metrics = json.loads(last_line).get("summary", {}).get("metrics", {})
    if metrics.get("total_turns") != samples * turns:
        raise WrongAnswer(f"{samples} samples were to play {turns} turns each: {last_line[:1000].decode()}")
    return Played(seconds, metrics)


async def post_sample(session: aiohttp.ClientSession) -> None:
    """Plays one sample of one turn. Raises `WrongAnswer` if that is not what comes back."""
    async with session.post("/rollout", data=ONE_SAMPLE, headers=JSON) as response:
        answer = await response.read()
        if response.status != HTTP_OK or b'"status":"max_turns"' not in answer:
            raise WrongAnswer(f"{response.status}: {answer[:1000].decode()}")


async def post_small_requests(session: aiohttp.ClientSession, clients: int, seconds: float) -> list[float]:
    """The seconds that each request took: `clients` callers post one sample of one turn after the other.

    Raises:
        WrongAnswer: one was not answered by its sample.
    """
    took: list[float] = []
    until = perf_counter() + seconds

    async def one_client() -> None:
        while (began := perf_counter()) < until:
            await post_sample(session)
            took.append(perf_counter() - began)

    await asyncio.gather(*(one_client() for _ in range(clients)))
    return took
