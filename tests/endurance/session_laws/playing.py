"""Plays random sessions, and compares records with what was answered.

Each session has 1 to 30 calls of OpenAI's client, which follow from its seed: an agent continues its conversations,
retries, edits, compacts and forgets, begins others, and makes up to three calls at the same time, with and without
streams, tools, thoughts and `n`; it sends messages back in other forms than it got them, and leaves some streams. What
must hold is in `laws.py`; the log-probabilities of those that are not greedy are compared with those of `POST /score`.
"""

import asyncio
from dataclasses import dataclass, field

import httpx
from openai import AsyncOpenAI

from rollout_client import AsyncRolloutClient
from tests.endurance.session_laws.laws import record_problems, stable_calls
from tests.endurance.session_laws.log_probabilities import differences_to_score
from tests.endurance.session_laws.random_agent import PlayedSession, RandomAgent

CONCURRENCY = 8
SETTLED_WITHIN_S = 60.0


@dataclass(slots=True)
class Tally:
    calls: int = 0
    stable: int = 0
    """Calls that continue a response which is rendered as it was generated."""
    streams_left: int = 0
    responses: int = 0
    differences: list[float] = field(default_factory=list)
    """Of log-probabilities from those of `POST /score`, by token."""
    problems: list[str] = field(default_factory=list)


def sampling_of(seed: int) -> dict[str, object]:
    """Every fourth session is greedy, every other one of the rest has a seed."""
    if seed % 4 == 0:
        return {"greedy": True}
    return {"temperature": 1.0, **({"seed": seed} if seed % 2 else {})}


async def play_session(url: str, client: AsyncRolloutClient, seed: int, tally: Tally) -> None:
    played = PlayedSession(seed, sampling_of(seed))
    async with (
        client.sessions.open(sampling=played.sampling) as session,
        AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0) as model,
        httpx.AsyncClient(base_url=url, timeout=SETTLED_WITHIN_S) as http,
    ):
        await RandomAgent(http, model, played).play()
        async with asyncio.timeout(SETTLED_WITHIN_S):
            while (info := await session.info()).calls_in_flight:
                await asyncio.sleep(0.05)
        samples = await session.samples()
    tally.problems += [f"session {seed}: {problem}" for problem in record_problems(played, samples, info)]
    if "greedy" not in played.sampling:
        tally.differences += await differences_to_score(client, samples)
    tally.calls += len(played.calls)
    tally.stable += stable_calls(played.calls)
    tally.streams_left += sum(bool(call.left) for call in played.calls)
    tally.responses += sum(len(call.choices) for call in played.calls)


async def play_sessions(url: str, seeds: range) -> Tally:
    tally, waiting = Tally(), iter(seeds)
    async with AsyncRolloutClient(url) as client:

        async def play_some() -> None:
            for seed in waiting:
                try:
                    await play_session(url, client, seed, tally)
                except Exception as error:  # noqa: BLE001 - the other sessions go on
                    tally.problems.append(f"session {seed}: {type(error).__name__}: {error}")

        await asyncio.gather(*(play_some() for _ in range(CONCURRENCY)))
    return tally
