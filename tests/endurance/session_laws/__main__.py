"""Plays random sessions, and compares records with what was answered: `python -m tests.endurance session-laws`.

Each session has 1 to 30 calls of OpenAI's client, which follow from its seed: an agent continues its conversations,
retries, edits, compacts and forgets, begins others, and makes up to three calls at the same time, with and without
streams, tools, thoughts and `n`; it sends messages back in other forms than it got them, and leaves some streams. The
model is the embedded one with tools, in 32 bits. What must hold is in `laws.py`; the log-probabilities of
those that are not greedy are compared with those of `POST /score`.

The last line is JSON. The exit code is 1 if something does not hold.
"""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import httpx
import typer
from openai import AsyncOpenAI
from ray.serve.schema import ServeDeploySchema

from examples.task_configs import config_for
from rollout_client import AsyncRolloutClient
from service.startup.local_service import local_service
from tests.endurance.program import console, ended_services, finish, rounds_shown
from tests.endurance.session_laws.laws import record_problems, stable_calls
from tests.endurance.session_laws.log_probabilities import differences_to_score
from tests.endurance.session_laws.random_agent import PlayedSession, RandomAgent

CONCURRENCY = 8
DTYPE = "float32"
"""In bfloat16 the same tokens differ by hundredths between a prompt and a response."""
TOLERANCE = 1e-3
"""For each log-probability."""
SETTLED_WITHIN_S = 60.0
MODEL, TASK_NAME = Path("models/small"), "math"


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
        with rounds_shown(len(seeds)) as show:

            async def play_some() -> None:
                for seed in waiting:
                    try:
                        await play_session(url, client, seed, tally)
                    except Exception as error:  # noqa: BLE001 - the other sessions go on
                        tally.problems.append(f"session {seed}: {type(error).__name__}: {error}")
                    show(f"{tally.calls} calls; {len(tally.problems)} problems")

            await asyncio.gather(*(play_some() for _ in range(CONCURRENCY)))
    return tally


def settings_of(config: Path) -> ServeDeploySchema:
    settings = config_for(config, MODEL, (TASK_NAME,))
    settings.applications[0].args["sessions"] = {}
    settings.applications[0].args["engine"] |= {"dtype": DTYPE}
    return settings


def main(
    config: Annotated[Path, typer.Argument()] = Path("serve_config.cpu.yaml"),
    sessions: Annotated[int, typer.Option(min=1)] = 1000,
    first: Annotated[int, typer.Option(min=0, help="The seed of the first session.")] = 0,
) -> None:
    with ended_services(), local_service(settings_of(config), console) as url:
        tally = asyncio.run(play_sessions(url, range(first, first + sessions)))
    found = tally.differences
    if late := sum(one > TOLERANCE for one in found):
        tally.problems.append(f"{late} of {len(found)} log-probabilities differ from POST /score's")
    figures = {name: getattr(tally, name) for name in ("calls", "stable", "streams_left", "responses")}
    finish(tally.problems, {**figures, "scored_tokens": len(found), "largest_difference": max(found, default=None)})


if __name__ == "__main__":
    typer.run(main)
